"""The page in a real browser, without any network and with scrollbars: each thing that a person can do with it, once.

Answers are the tiny model's. Where a text must be known, the test puts it into the conversation as an answer.
"""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from ostinato import LLM
from ostinato.errors import BadFile
from ostinato.serve.app import policy_for
from tests.serve.browser import browser
from tests.serve.fronting import fronting
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

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def never_end(self) -> None:
        """Let answers go on past the model's end token, so that they can be watched."""
        self.run("const was = requestBody; window.requestBody = () => ({ ...was(), ignore_eos: true })")

    def answered(self, text: str, tokens: int = 3) -> None:
        """Send a message and wait for the end of a short answer."""
        self.put("max_tokens", str(tokens))
        self.send(text)
        self.until(lambda: self.ended() and "ended by" in self.facts, "it is answered")

    def holds(self, answer: str) -> None:
        """Let the conversation be a question and this answer."""
        script = "chat.messages = [{ role: 'user', content: 'hi' }, { role: 'assistant', content: arguments[0] }]"
        self.run(f"{script}; touch(chat); drawTalk()", answer)

    def press(self, name: str, where: str = "body") -> None:
        """Press the last button of this name, as a mouse does."""
        buttons = [one for one in self.all(f"{where} button") if one.text == name]
        assert buttons, f"no button {name} in {where}"
        buttons[-1].click()

    def set(self, field: str, value: str) -> None:
        """Paste into a field, or choose in a list."""
        script = "const f = $(arguments[0]); f.value = arguments[1]; f.dispatchEvent(new Event('input'))"
        self.run(script, field, value)

    @property
    def titles(self) -> list[str]:
        return [one.text for one in self.all("#list .chat")]

    @property
    def messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.run("return chat.messages")
        return found


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
    driver.get("about:blank")  # a page that is left may still keep something
    emptied = {"origin": slow_server.url, "storageTypes": "local_storage"}
    driver.execute_cdp_cmd("Storage.clearDataForOrigin", emptied)
    made = Page(driver, slow_server.url)
    made.until(lambda: made.run("return highlighter !== null && models.size > 0"), "it is there again")
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
    assert page.find(".said.user .text").text == "hello"
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
    assert page.messages[-1]["content"] == same
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


HOSTILE = r"""# Title
<img src=x onerror="document.title=1"> <script>document.title=2</script> [bad](javascript:document.title=3)
[worse](  JaVaScRiPt&colon;document.title=4) [data](data:text/html,x) ![pixel](https://example.org/pixel.png)
<https://example.org/auto> [good](https://example.org "title") <a href="javascript:document.title=5">a</a>
[reference]

[reference]: javascript:document.title=6

<details open ontoggle="document.title=7"><svg onload="document.title=8"></details>

```html" onclick="document.title=9
<b onclick="document.title=10">x</b></pre><img src=x onerror="document.title=11">
```

$\href{javascript:document.title=12}{x} \class{evil}{y} \includegraphics{https://example.org/a.png}$
$\style{position:fixed}{z}$
"""


def test_what_a_model_writes_is_shown_and_never_run(page: Page) -> None:
    page.holds(HOSTILE)
    page.holds(">" * 3000 + "x\n\n" + "- " * 3000)  # deeper than a parser that calls itself can follow
    assert "x" in page.answer
    page.holds(HOSTILE)
    markup = "return [...document.querySelectorAll('.words *')].map(e => e.tagName.toLowerCase())"
    assert not {"img", "script", "svg", "iframe", "b", "style"} & set(page.run(markup))
    attributes = "return [...document.querySelectorAll('.words *')].flatMap(e => e.getAttributeNames())"
    assert not [name for name in page.run(attributes) if name.startswith("on")]
    links = {a.get_attribute("href") for a in page.all(".words a")}
    assert links == {"https://example.org/pixel.png", "https://example.org/auto", "https://example.org/"}
    assert not page.all(".words .evil, .words math [href]")
    assert '<b onclick="document.title=10">x</b></pre><img' in page.find(".words pre code").text
    assert "onerror" in page.answer
    for link in page.all(".words a, .words span[title]"):
        page.run("arguments[0].target = '_self'; arguments[0].addEventListener('click', e => e.preventDefault())", link)
        link.click()
    assert page.driver.title == "Ostinato"


MARKDOWN = r"""A ~~wrong~~ word &amp; more.

- one
  - two
    1. three
- [x] done
- [ ] to do

| left | centre | right |
|:-----|:------:|------:|
| a    | b      | 1     |

```python
def add(a): return a
```

For 5$ or $7, \(a_1\) and $e^{i\pi}$:

$$\frac{1}{2}$$

\[ \bad{ \]
"""


def test_markdown_has_nested_and_task_lists_strikes_aligned_tables_coloured_code_and_math(page: Page) -> None:
    page.holds(MARKDOWN)
    assert page.find(".words p").text == "A wrong word & more."
    assert page.find(".words del").text == "wrong"
    assert page.find(".words > ul > li > ul > li > ol > li").text == "three"
    assert [box.get_attribute("checked") for box in page.all(".words li.task input")] == ["true", None]
    aligned = "return [...document.querySelectorAll('.words td')].map(cell => getComputedStyle(cell).textAlign)"
    assert page.run(aligned) == ["left", "center", "right"]
    assert page.find(".words .language").text == "python"
    assert page.find(".words .hljs-keyword").text == "def"
    assert page.find(".words pre").text == "def add(a): return a"
    assert len(page.all(".words math")) == 3
    assert page.find(".words .formula math mfrac").is_displayed()
    assert "For 5$ or $7, " in page.answer
    assert "\\bad{" in page.answer  # a formula that cannot be read is shown as it was written
    namespace = "return document.querySelector('.words math').namespaceURI"
    assert str(page.run(namespace)).endswith("MathML")


def test_a_stream_redraws_its_last_block_only(page: Page) -> None:
    page.holds("first\n\nsecond")
    kept = "const p = document.querySelector('.words p'); markdown(arguments[0], p.parentNode); return p.isConnected"
    assert page.run(kept, "first\n\nsecond and more\n\n- third")
    assert page.answer == "firstsecond and morethird"
    assert not page.run(kept, "other")
    assert page.answer == "other"


def test_conversations_are_kept_listed_renamed_deleted_and_exported(page: Page, tmp_path: Path) -> None:
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", folder)
    page.answered("the first question")
    page.press("New chat", "header")
    page.answered("the second question")
    page.driver.refresh()
    page.until(lambda: page.titles == ["the second question", "the first question"], "both are listed, newest first")
    assert [message["role"] for message in page.messages] == ["user", "assistant"]
    page.all("#list .chat")[1].click()
    assert page.all(".said.user .text")[0].text == "the first question"
    page.press("rename", "#list")
    page.find("#list input").send_keys(Keys.CONTROL, "a")
    page.find("#list input").send_keys("Lamps & ships", Keys.ENTER)
    assert "Lamps & ships" in page.titles
    page.press(".json", "#list")
    page.press(".md", "#list")
    page.press("export all", "#chats")
    names = {"Lamps-ships.json", "Lamps-ships.md", "ostinato-chats.json"}
    page.until(lambda: {path.name for path in tmp_path.iterdir()} == names, "three files are written")
    exported = json.loads((tmp_path / "Lamps-ships.json").read_text())
    assert exported["messages"] == page.messages
    markdown = (tmp_path / "Lamps-ships.md").read_text()
    assert markdown.startswith("# Lamps & ships\n\n## user\n\nthe first question\n\n## assistant\n\n")
    assert len(json.loads((tmp_path / "ostinato-chats.json").read_text())) == 2
    page.press("delete", "#list")
    assert page.titles == ["the second question"]
    page.press("undo", "#notice")
    assert len(page.titles) == 2
    page.press("delete", "#list")
    page.driver.refresh()
    page.until(lambda: page.titles == ["the second question"], "it is gone")
    page.find("#importFile").send_keys(str(tmp_path / "Lamps-ships.md"))
    page.until(lambda: "no conversation" in page.find("#notice").text, "a file that is no export is refused")
    page.find("#importFile").send_keys(str(tmp_path / "Lamps-ships.json"))
    page.until(lambda: "Lamps & ships" in page.titles, "an exported one comes back")
    assert page.messages == exported["messages"]


def test_a_full_storage_is_told_and_the_chat_goes_on(page: Page) -> None:
    fill = "for (let n = 1 << 22, i = 0; n; i++) try { localStorage.setItem('x' + i, 'x'.repeat(n)) } catch { n >>= 1 }"
    page.run(fill)
    page.answered("hello")
    assert "storage is full" in page.find("#notice").text
    page.answered("hello again")
    assert len(page.messages) == 4
    page.run("for (const key of Object.keys(localStorage)) if (key.startsWith('x')) localStorage.removeItem(key)")
    page.answered("once more")
    page.driver.refresh()
    page.until(lambda: len(page.messages) == 6, "with room again, it is kept")


def test_a_message_is_edited_and_an_answer_regenerated(page: Page, slow_server: Running) -> None:
    page.answered("one")
    page.answered("two")
    before = page.messages
    page.press("regenerate", ".said:last-child")
    page.until(lambda: page.ended() and "ended by" in page.facts, "it is answered again")
    assert page.messages[:3] == before[:3]
    assert len(page.messages) == 4
    page.all(".said.user")[0].find_elements(By.CSS_SELECTOR, "button")[-1].click()
    assert page.find(".said textarea").get_attribute("value") == "one"
    page.find(".said textarea").send_keys(" and a half")
    page.press("Send, replacing what follows")
    page.until(lambda: page.ended() and "ended by" in page.facts, "the edited question is answered")
    assert [message["content"] for message in page.messages[:1]] == ["one and a half"]
    assert len(page.messages) == 2
    page.press("undo", "#notice")
    assert page.messages[:3] == before[:3]
    page.press("edit", ".said.assistant")
    page.find(".said textarea").clear()
    page.find(".said textarea").send_keys("the *better* answer")
    page.press("Save")
    assert page.find(".words em").text == "better"
    assert page.run("return requestBody().messages.at(-1).content") == "the *better* answer"


def test_any_message_and_any_code_can_be_copied(page: Page) -> None:
    allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", allowed)
    page.holds("**bold**\n\n```py\nx = 1\n```")

    def copied() -> str:
        return str(page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0], arguments[0])"))

    for where, text in (
        (".block", "x = 1"),
        (".said.user", "hi"),
        (".said.assistant > .acts", "**bold**\n\n```py\nx = 1\n```"),
    ):
        page.press("copy", where)
        page.until(lambda text=text: copied() == text, f"{where} is copied")  # type: ignore[misc]


def test_a_text_file_is_attached_and_a_binary_one_is_refused(page: Page, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("lamp: ``` on\n")
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00")
    page.find("#file").send_keys(str(tmp_path / "picture.bin"))
    page.until(lambda: "picture.bin is no text" in page.find("#notice").text, "it is refused")
    page.find("#file").send_keys(str(tmp_path / "notes.txt"))
    page.until(lambda: page.all("#files button"), "it is attached")
    page.answered("what is on?")
    assert page.all("#files button") == []
    assert "notes.txt" in page.find(".said.user summary").text
    sent = page.run("return requestBody().messages[0].content")
    assert sent == "notes.txt:\n````\nlamp: ``` on\n\n````\n\nwhat is on?"


def test_the_meter_shows_the_context_used_and_cached(page: Page) -> None:
    page.answered("hello " * 30)
    page.answered("hello")
    usage = page.messages[-1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert page.find("#used").text == f"{usage['total_tokens']} of 4,096 tokens of context, {cached} cached"
    widths = "return [...document.querySelectorAll('#use i')].map(i => parseFloat(i.style.width))"
    parts = (cached, usage["prompt_tokens"] - cached, usage["completion_tokens"])
    assert page.run(widths) == pytest.approx([100 * part / 4096 for part in parts], abs=0.01)


def test_a_model_is_chosen_from_those_that_are_listed(page: Page, slow_server: Running) -> None:
    assert page.run("return [...$('model').options].map(o => o.value)") == ["tiny"]
    two = '{"data": [{"id": "tiny", "max_model_len": 4096}, {"id": "other"}]}'
    page.run(
        "const was = call; window.call = (path, options) =>"
        " path === '/v1/models' ? Promise.resolve(new Response(arguments[0])) : was(path, options)".replace(
            "arguments[0]", json.dumps(two)
        )
    )
    page.run("return loadModels()")
    page.find("#model").send_keys("other")
    page.send("hello")
    page.until(lambda: page.all(".said.failed"), "the server, which has no such model, refuses it")
    assert "other" in page.facts
    page.driver.refresh()
    page.until(lambda: page.find("#model").text == "tiny", "a choice that is no longer listed is not taken")


def test_one_of_two_models_is_loaded_by_the_first_message_to_it(driver: Any, tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    shutil.copy(tiny, other)
    with fronting(tiny, other, llm={"context": 256}) as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        page = Page(driver, server.url)
        page.until(lambda: page.run("return models.size") == 2, "both are listed")
        page.find("#model").send_keys("other")
        about = "return $('about').textContent"
        page.until(lambda: page.run(about) == "loaded by the first message", "it is told that it is not in memory")
        page.until(lambda: len(page.all("#slots > *")) == 0, "it has no slots yet")
        page.answered("hello")
        assert page.run("return wire.request").count('"other"') == 1
        assert server.state(1) == "ready"
        page.until(lambda: page.run(about).startswith("loop on cpu"), "it is told how it runs")
        page.until(lambda: page.run("return contextOf('other')") == 256, "its context is listed now")
        page.until(lambda: len(page.all("#slots > *")) == 2, "its slots are shown")


def test_models_are_listed_although_none_is_in_memory(driver: Any, tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny, tmp_path / "other.gguf")

    def load(index: int) -> LLM:
        raise BadFile("it is damaged")

    with fronting(tiny, tmp_path / "other.gguf", load=load) as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 503
        page = Page(driver, server.url)
        page.until(lambda: page.run("return models.size") == 2, "both are listed")
        page.until(lambda: page.run("return $('about').textContent") == "it is damaged", "what is wrong is told")


SCHEMA = (
    '{"type": "object", "properties": {"lit": {"type": "boolean"}}, "required": ["lit"], "additionalProperties": false}'
)
LOOK = f'[{{"name": "look", "description": "Looks.", "parameters": {SCHEMA}}}]'


def test_a_schema_is_sent_and_its_mistakes_are_told(page: Page) -> None:
    page.find("#formatPanel summary").click()
    page.set("format", "json_schema")
    page.set("definition", "{")
    assert "no JSON" in page.find("#formatWrong").text
    page.send("hello")
    assert "no JSON" in page.find("#notice").text
    assert page.find("#ask").get_attribute("value") == "hello"
    page.set("definition", SCHEMA)
    assert not page.find("#formatWrong").is_displayed()
    assert page.find("#on").text == "json_schema"
    page.answered("", 100)
    assert isinstance(json.loads(page.messages[-1]["content"])["lit"], bool)
    assert page.find(".words .language").text == "json"
    page.find("#wirePanel summary").click()
    request, answer = (json.loads(page.find(where).text) for where in ("#request", "#answer"))
    assert request["response_format"]["json_schema"]["schema"] == json.loads(SCHEMA)
    assert answer["usage"]["completion_tokens"] > 0


def test_calls_of_tools_are_seen_and_answered(page: Page, slow_server: Running) -> None:
    page.find("#toolsPanel summary").click()
    page.set("tools", LOOK)
    page.set("tool_choice", "required")
    assert page.find("#on").text == "1 tool"
    page.answered("is it lit?", 150)
    assert page.find(".call b").text == "call of look"
    assert isinstance(json.loads(page.find(".call pre").text)["lit"], bool)
    page.set("tool_choice", "none")
    page.find(".result").send_keys("it is")
    page.press("Send results")
    page.until(lambda: len(page.messages) == 4 and page.ended(), "the result is answered")
    call, result = page.run("return requestBody().messages.slice(1, 3)")
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "it is"}
    assert "it is" in page.find(".said.tool").text
    assert not page.all(".result")


def test_an_answer_goes_on_while_another_conversation_is_looked_at(page: Page) -> None:
    page.answered("first")
    page.never_end()
    page.find("#ask").send_keys(Keys.ALT, "n")
    page.put("max_tokens", "4000")  # so that it does not end meanwhile, which draws the list again
    page.send("second")
    page.until(lambda: page.answer, "words come")
    early = page.answer
    page.all("#list .chat")[1].click()
    assert page.all(".said.user .text")[0].text == "first"
    page.all("#list .chat")[0].click()
    page.until(lambda: len(page.answer) > len(early), "more words have come")
    page.find("#stop").click()
    page.until(page.ended, "it stops")
    page.driver.refresh()
    page.until(lambda: page.all(".said.assistant"), "it is kept")
    assert len(page.messages[-1]["content"]) > len(early)
    assert "stopped after" in page.facts


def test_a_page_that_is_left_in_the_middle_keeps_what_had_come(page: Page, slow_server: Running) -> None:
    page.never_end()
    page.put("max_tokens", "4000")
    page.send("hello")
    page.until(lambda: len(page.answer) > 20, "words come")
    page.driver.refresh()
    page.until(lambda: page.titles == ["hello"], "it is listed")
    assert len(page.messages[-1]["content"]) > 20
    assert "stopped after" in page.facts
    page.until(lambda: slow_server.llm.stats().live == 0, "its slot is free")


def test_reasoning_is_folded_away_and_not_sent_back(page: Page) -> None:
    page.holds("an answer")
    page.run("chat.messages[1].reasoning = 'let me <b>think</b>'; drawTalk()")
    page.find(".thought summary").click()
    assert page.find(".thought div").text == "let me <b>think</b>"
    assert page.run("return requestBody().messages[1]") == {"role": "assistant", "content": "an answer"}


def test_two_tabs_see_each_others_conversations(page: Page, slow_server: Running) -> None:
    page.answered("hello")
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    try:
        Page(page.driver, slow_server.url)
        assert page.titles == ["hello"]
        page.answered("from the other tab")
    finally:
        page.driver.close()
        page.driver.switch_to.window(first)
    page.until(lambda: len(page.all(".said.user")) == 2, "the message of the other tab is shown")
    assert len(page.messages) == 4


def test_with_a_key_the_browser_asks_once_and_libraries_come_too(driver: Any, tiny: Path) -> None:
    with serving(tiny, llm={"context": 256, "slots": 1}, keys=("a-secret-key",)) as server:
        page = Page(driver, server.url.replace("//", "//me:a-secret-key@"))
        page.until(lambda: page.run("return highlighter !== null && models.size > 0"), "libraries and models are there")
        page.answered("hello")


def right_edge(page: Page, where: str) -> list[int]:
    """The brightness of a column of pixels in the scrollbar of an element."""
    box = page.find(where).rect
    picture = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("L")
    x, top, bottom = box["x"] + box["width"] - 6, box["y"] + 20, box["y"] + box["height"] - 20
    return list(picture.crop((int(x), int(top), int(x) + 1, int(bottom))).tobytes())


def test_scrollbars_are_dark_in_the_dark_and_settings_stand_above_the_slots(page: Page) -> None:
    page.holds("line\n\n" * 60)
    page.run("document.documentElement.dataset.theme = 'dark'")
    assert page.run("return $('talk').offsetWidth - $('talk').clientWidth") > 5, "a scrollbar takes room here"
    for where in ("#talk", "aside"):
        assert max(right_edge(page, where)) < 110, where
    page.run("document.documentElement.dataset.theme = 'light'")
    assert min(right_edge(page, "#talk")) > 110
    fold = page.run("return innerHeight")
    last = page.find("#key").rect
    assert last["y"] + last["height"] < fold
    assert page.find("#slots").rect["y"] > last["y"]
    assert page.find("#gaps").rect["y"] > page.find("#slots").rect["y"]


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
        page.until(lambda: page.find("#sideButton").is_displayed(), "the narrow form is shown")
        assert not page.find("aside").is_displayed()
        assert page.find("#model").is_displayed()
        assert page.run("return $('model').selectedOptions[0].text") == "tiny"
        assert page.find("#model").rect["width"] > 280, "a long name has room"
        assert page.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        page.find("#sideButton").click()
        assert page.find("#temperature").is_displayed()
        page.find("#sideButton").click()
        page.find("#chatsButton").click()
        assert page.titles == ["hello"]
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
