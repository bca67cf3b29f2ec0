"""Draws the pictures of the page that docs/ keeps: `python -m tests.serve.screenshot docs`. Not run by the tests."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serve.browser import browser
from tests.serve.running import serving

ASK = "What is a lighthouse for? Give a short answer with a list of three points."
PHONE = {"width": 390, "height": 780, "deviceScaleFactor": 1.5, "mobile": True}


def ask(driver: Any, text: str) -> None:
    driver.find_element(By.ID, "ask").send_keys(text, Keys.ENTER)
    time.sleep(1)
    while not driver.find_element(By.ID, "send").is_displayed():
        time.sleep(0.1)


def main(folder: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as profile,
        serving("smollm2", llm={"context": 2048, "slots": 4}) as server,
        browser(Path(profile), width=1200, height=880) as driver,
    ):
        driver.get(server.url)
        driver.execute_script("localStorage.setItem('ostinato.temperature', '0')")
        driver.execute_script("localStorage.setItem('ostinato.max_tokens', '160')")
        driver.execute_script("localStorage.setItem('ostinato.theme', 'light')")
        driver.get(server.url)
        time.sleep(1)
        ask(driver, ASK)
        driver.find_element(By.ID, "ask").send_keys("And who keeps it?", Keys.ENTER)
        time.sleep(2.5)
        driver.save_screenshot(str(folder / "page.png"))  # while it answers
        while not driver.find_element(By.ID, "send").is_displayed():
            time.sleep(0.1)
        driver.find_element(By.ID, "theme").click()
        time.sleep(0.5)
        driver.save_screenshot(str(folder / "page-dark.png"))
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        time.sleep(0.5)
        driver.save_screenshot(str(folder / "page-phone.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
