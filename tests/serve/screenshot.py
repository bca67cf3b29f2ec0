"""Draws the pictures of the page that docs/ keeps: `python -m tests.serve.screenshot docs`. Not run by the tests.

With `--every-size` it draws three sizes in both themes instead, to be looked at after a change of the page.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serve.browser import browser
from tests.serve.running import serving

EARLIER = ("Name three famous bridges.", "What does a librarian do?")
ASK = "Write a Python function is_even(n). Then list three things to know about it."
AGAIN = "And how do I test it?"
MIDDLE = 60  # tokens of that answer, when its picture is taken
# In the page, because questions from outside would slow the answer.
UNTIL_MIDDLE = """
const [middle, done] = arguments;
const timer = setInterval(() => {
  const enough = parseInt(document.querySelector(".slot[data-state=live] span:last-child")?.textContent) >= middle;
  if (enough || !running) { clearInterval(timer); done(enough); }
}, 20);
"""
REVIEW = "Judge this sentence: I love the old lighthouse on the cliff."
SCHEMA = """{
  "type": "object",
  "properties": {
    "sentiment": {"enum": ["positive", "negative"]},
    "about": {"enum": ["lighthouse", "ship", "weather"]}
  },
  "required": ["sentiment", "about"],
  "additionalProperties": false
}"""
SETTINGS = {"temperature": "0", "max_tokens": "220"}
WIDTH, HEIGHT = 1280, 960
PHONE = (390, 780)
SIZES = {"desktop": (1440, 900), "tablet": (1024, 768), "phone": PHONE}


@contextmanager
def page() -> Iterator[Any]:
    """A browser with the page of the default model, and the settings of the pictures."""
    with (
        tempfile.TemporaryDirectory() as profile,
        serving("smollm2", llm={"context": 2048, "slots": 4}) as server,
        browser(Path(profile), width=WIDTH, height=HEIGHT) as driver,
    ):
        driver.get(server.url)
        for name, value in {**SETTINGS, "theme": "light"}.items():
            driver.execute_script("localStorage.setItem('ostinato.' + arguments[0], arguments[1])", name, value)
        driver.get(server.url)
        resize(driver, WIDTH, HEIGHT)
        time.sleep(1)
        yield driver


def resize(driver: Any, width: int, height: int) -> None:
    """The size of what is seen, without the browser's own frame; a narrow one is a phone's."""
    narrow = width < 600
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1.5 if narrow else 1, "mobile": narrow}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def ask(driver: Any, text: str, *, fresh: bool = False) -> None:
    if fresh:
        driver.find_element(By.ID, "fresh").click()
    driver.find_element(By.ID, "ask").send_keys(text, Keys.ENTER)


def wait(driver: Any) -> None:
    """Until the answer has ended, and the slots were polled again."""
    while not driver.find_element(By.ID, "send").is_displayed():
        time.sleep(0.1)
    time.sleep(0.6)


def converse(driver: Any) -> None:
    for text in (*EARLIER, ASK):
        ask(driver, text, fresh=True)
        wait(driver)


def with_schema(driver: Any) -> None:
    """An answer in the form of a schema, with the panel that it was sent from."""
    driver.find_element(By.CSS_SELECTOR, "#formatPanel summary").click()
    driver.find_element(By.ID, "format").send_keys("JSON schema")
    field = "const f = $('definition'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))"
    driver.execute_script(field, SCHEMA)
    ask(driver, REVIEW, fresh=True)
    wait(driver)


def draw(driver: Any, path: Path) -> None:
    time.sleep(0.5)
    driver.save_screenshot(str(path))


def for_docs(folder: Path) -> None:
    with page() as driver:
        converse(driver)
        ask(driver, AGAIN)
        assert driver.execute_async_script(UNTIL_MIDDLE, MIDDLE), "the answer was over too soon; try again"
        driver.save_screenshot(str(folder / "page.png"))
        wait(driver)
        resize(driver, *PHONE)
        draw(driver, folder / "page-phone.png")
        resize(driver, WIDTH, HEIGHT)
        driver.find_element(By.ID, "theme").click()
        with_schema(driver)
        draw(driver, folder / "page-dark.png")


def every_size(folder: Path) -> None:
    with page() as driver:
        converse(driver)
        for theme in ("light", "dark"):
            for name, size in SIZES.items():
                resize(driver, *size)
                draw(driver, folder / f"{name}-{theme}.png")
            driver.find_element(By.ID, "theme").click()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws pictures of the page.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every-size", action="store_true", help="three sizes in both themes")
    given = parser.parse_args()
    (every_size if given.every_size else for_docs)(given.folder)
