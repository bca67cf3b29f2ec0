"""The page in a real browser, without any network: it sends, streams, stops, keeps settings and shows the slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from ostinato.serve.app import policy_for
from tests.serve.browser import browser
from tests.serve.running import DEADLINE_S, Running, serving

pytestmark = pytest.mark.slow
PAGES = Path(policy_for.__code__.co_filename).parent


class Page:
    """What a person can do."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(url)
        self.until(lambda: self.all("#dot.ready"), "it is connected")

    def find(self, where: str) -> WebElement:
        found: WebElement = self.driver.find_element(By.CSS_SELECTOR, where)
        return found

    def all(self, where: str) -> list[WebElement]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, where))

    def until(self, is_true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < end, f"never happened: {what}; {self.driver.get_log('browser')}"
            time.sleep(0.02)

    def send(self, text: str) -> None:
        self.find("#ask").send_keys(text, Keys.ENTER)

    def put(self, field: str, value: str) -> None:
        self.find(f"#{field}").clear()
        self.find(f"#{field}").send_keys(value)

    def ended(self) -> bool:
        return self.find("#send").is_displayed()

    @property
    def answer(self) -> str:
        return self._last("words")

    @property
    def facts(self) -> str:
        return self._last("facts")

    def _last(self, part: str) -> str:
        # At once, in the page: it replaces its elements while words come.
        script = "return [...document.querySelectorAll('.said.assistant .' + arguments[0])].pop()?.textContent || ''"
        return str(self.driver.execute_script(script, part))

    def never_end(self) -> None:
        """Let answers go on past the model's end token, so that they can be watched."""
        self.driver.execute_script("const was = body; window.body = () => ({ ...was(), ignore_eos: true })")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def slow_server(tiny: Path) -> Iterator[Running]:
    """With steps so slow and a context so long that an answer can be watched."""
    with serving(tiny, llm={"context": 4096, "slots": 4, "mode": "eager"}) as running:
        yield running


@pytest.fixture
def page(driver: Any, slow_server: Running) -> Page:
    made = Page(driver, slow_server.url)
    driver.execute_script("localStorage.clear(); sessionStorage.clear()")
    driver.get(slow_server.url)
    made.until(lambda: made.find("#ask").is_displayed(), "it is there again")
    return made


def test_a_message_is_answered_in_a_stream_with_its_pace(page: Page, slow_server: Running) -> None:
    page.never_end()
    page.put("max_tokens", "300")
    page.send("hello")
    page.until(lambda: page.answer, "words come")
    early = page.answer
    page.until(page.ended, "it ends")
    assert len(page.answer) > len(early)
    assert "300 tokens" in page.facts
    assert "tokens per second" in page.facts
    assert page.all(".said.user")[0].text == "hello"
    assert slow_server.log[-1]["path"] == "/v1/chat/completions"
    errors = [line for line in page.driver.get_log("browser") if line["level"] == "SEVERE"]
    assert errors == []


def test_stop_ends_an_answer_by_key_and_by_button(page: Page, slow_server: Running) -> None:
    page.never_end()
    page.put("max_tokens", "4000")
    page.put("temperature", "0")

    def by_button() -> None:
        page.find("#stop").click()

    def by_key() -> None:
        page.find("#ask").send_keys(Keys.ESCAPE)

    for stop in (by_button, by_key):
        page.send("go on and on")
        page.until(lambda: page.find("#stop").is_displayed() and page.answer, "words come")
        stop()
        page.until(page.ended, "it stops")
        assert "stopped" in page.facts
        page.until(lambda: slow_server.llm.stats().live == 0, "its slot is free")


def test_the_slots_move_and_the_gaps_are_drawn(page: Page) -> None:
    page.never_end()
    page.put("max_tokens", "4000")
    page.put("temperature", "0")
    page.until(lambda: len(page.all(".slot")) == 4, "the slots are shown")
    assert all(slot.get_attribute("data-state") == "free" for slot in page.all(".slot"))
    page.send("hello")
    page.until(lambda: page.all(".slot[data-state=live]"), "a slot lives")
    page.until(lambda: "tokens" in page.all(".slot[data-state=live] span:last-child")[0].text, "and says how far it is")
    page.until(lambda: page.find("#median").text.endswith("ms"), "the device's gaps are told")
    painted = "return [...document.getElementById('gaps').getContext('2d').getImageData(0,0,600,60).data].some(v => v)"
    page.until(lambda: page.driver.execute_script(painted), "the gaps are drawn")
    page.find("#ask").send_keys(Keys.ESCAPE)
    page.until(page.ended, "it stops")
    page.until(lambda: not page.all(".slot[data-state=live]"), "the slot is shown free")


def test_settings_reach_the_server_and_are_kept(page: Page, slow_server: Running) -> None:
    page.put("system", "You are a lighthouse.")
    page.put("max_tokens", "7")
    page.put("seed", "5")
    page.put("temperature", "0.5")
    page.send("hello")
    page.until(lambda: page.all(".said.assistant"), "it is asked")
    page.until(page.ended, "it ends")
    messages = [{"role": "system", "content": "You are a lighthouse."}, {"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 7, "seed": 5, "temperature": 0.5}
    same = slow_server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    shown = page.driver.execute_script("return said[said.length - 1].content")
    assert shown == same
    page.driver.refresh()
    page.until(lambda: page.find("#max_tokens").get_attribute("value") == "7", "settings are kept")
    assert page.find("#system").get_attribute("value") == "You are a lighthouse."


def test_an_error_is_shown_and_the_chat_goes_on(page: Page) -> None:
    page.driver.execute_script("document.getElementById('temperature').value = '-3'")
    page.send("hello")
    page.until(lambda: page.all(".said.failed"), "the error is shown")
    assert "temperature" in page.all(".said.failed")[0].text
    page.put("temperature", "0")
    page.put("max_tokens", "3")
    page.send("hello")
    page.until(lambda: "tokens" in page.facts, "it is answered")


def test_what_a_model_writes_is_shown_and_never_run(page: Page) -> None:
    text = (
        "# Title\\n<img src=x onerror='document.title=1'> **bold** `code` [bad](javascript:alert(1)) "
        "[good](https://example.org)\\n\\n- one\\n- two\\n\\n```py\\n<b>x</b>\\n```\\n\\n"
        "| a | b |\\n|---|---|\\n| 1 | 2 |"
    )
    page.driver.execute_script(f'const box = show("assistant"); box.id = "made"; markdown("{text}", box);')
    made = page.find("#made")
    assert page.all("#made img") == []
    assert [a.get_attribute("href") for a in page.all("#made a")] == ["https://example.org/"]
    assert "<b>x</b>" in page.find("#made pre code").text
    assert [len(page.all(f"#made {tag}")) for tag in ("h3", "strong", "li", "td", "th")] == [1, 1, 2, 2, 2]
    assert "onerror" in made.text
    assert page.driver.title == "Ostinato"


def test_it_can_be_used_by_keys_alone_in_dark_and_on_a_phone(page: Page) -> None:
    before = page.driver.execute_script("return document.documentElement.dataset.theme")
    page.find("#ask").send_keys(Keys.ALT, "t")
    page.until(
        lambda: page.driver.execute_script("return document.documentElement.dataset.theme") != before, "it changes"
    )
    page.put("max_tokens", "2")
    page.send("hello")
    page.until(lambda: page.all(".said.assistant"), "it is asked")
    page.until(page.ended, "it ends")
    page.find("#ask").send_keys(Keys.ALT, "n")
    page.until(lambda: not page.all(".said"), "a new chat begins")
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        page.until(lambda: page.find("#toggle").is_displayed(), "the narrow form is shown")
        assert not page.find("aside").is_displayed()
        assert page.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        page.find("#toggle").click()
        assert page.find("#temperature").is_displayed()
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_of_the_api_works_without_network(driver: Any, slow_server: Running) -> None:
    driver.get_log("browser")  # what was said before is of other tests
    driver.get(f"{slow_server.url}/docs")
    end = time.monotonic() + DEADLINE_S
    while len(driver.find_elements(By.CSS_SELECTOR, "details")) < 13:
        assert time.monotonic() < end
        time.sleep(0.05)
    box = next(d for d in driver.find_elements(By.CSS_SELECTOR, "details") if "/tokenize" in d.text)
    box.find_element(By.TAG_NAME, "summary").click()
    box.find_element(By.TAG_NAME, "button").click()
    while '"count"' not in box.find_element(By.TAG_NAME, "pre").text:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


def test_the_pages_name_nothing_outside_this_server() -> None:
    for name in ("page.html", "docs.html"):
        text = (PAGES / name).read_text(encoding="utf-8")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
