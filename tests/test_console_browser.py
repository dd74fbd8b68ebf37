"""The console in a real browser, with a real model: Chromium and its driver, as Debian packages them.

Pictures of what was seen are left in build/console. Skipped where there is no browser: `make console` says how to get
one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from served import Served, served

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install '.[dev]'")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="there is no browser: apt install chromium chromium-driver"
)

PICTURES = Path(__file__).parent.parent / "build" / "console"
MODEL = "smollm2-135m"
VIEWS = ("chat", "load", "cache", "requests")
SYSTEM = "You are careful, and say where a thing can be looked up. " * 20
WAIT_SECONDS = 40


class Browser:
    """A page of the console, and what a person does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.expected: tuple[str, ...] = ()
        """What may stand among the errors on the browser's console."""

    def open(self, url: str, view: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{url}/console#{view}")
        self.until(lambda: self.text("status") not in ("connecting", ""))

    def view(self, name: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, f"nav a[href='#{name}']").click()
        self.until(lambda: not self.script(f"return document.getElementById('view-{name}').hidden"))

    def id(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return self.script("return document.getElementById(arguments[0]).textContent", name)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def press(self, *keys: str) -> None:
        """Keys, for whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def until(self, holds: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
        """Waits for something that is true, and gives it."""
        end = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < end, f"waited {seconds} s in vain"
            time.sleep(0.1)
        return found

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1.5, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def media(self, scheme: str = "light", motion: str = "no-preference") -> None:
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        wanted = [{"name": name, "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(PICTURES / f"{name}.png"))

    def errors(self) -> list[str]:
        """What the browser has complained of since the last call."""
        found = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
        return [message for message in found if not any(part in message for part in self.expected)]


@pytest.fixture(scope="module")
def server(real_model: Callable[[str], Path]) -> Iterator[Served]:
    real_model(MODEL)
    with served(MODEL, "--kv-bytes", "200M") as running:
        yield running


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(driver: Any) -> Iterator[Browser]:
    """A window on a desk, in light; nothing may have gone wrong in it."""
    browser = Browser(driver)
    browser.size(1280, 900)
    browser.media()
    yield browser
    assert browser.errors() == []
    origins = browser.script("return performance.getEntriesByType('resource').map(each => new URL(each.name).origin)")
    assert set(origins) <= {browser.script("return location.origin")}
    driver.get("about:blank")


class Client(threading.Thread):
    """Somebody else who streams a long answer. `events` are what came."""

    def __init__(self, url: str, max_tokens: int, question: str = "Tell me about rivers.", id: str = "") -> None:
        super().__init__(daemon=True)
        self._url = url
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        self._body = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": 1}
        self._headers = {"x-request-id": id} if id else {}
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        call = {"json": self._body, "headers": self._headers, "timeout": 300}
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", **call) as answer:
            self.events += [line[6:] for line in answer.iter_lines() if line]


def figures(browser: Browser) -> dict[str, str]:
    """Those below the last answer: their values by name."""
    found: dict[str, str] = browser.script(
        "const last = [...document.querySelectorAll('.figures')].at(-1);"
        "return Object.fromEntries([...last.children].map("
        "each => [each.lastChild.textContent.trim(), each.firstChild.innerText]))"
    )
    return found


def ask(browser: Browser, question: str) -> None:
    browser.id("prompt").click()
    browser.press(question, Keys.ENTER)


def answered(browser: Browser) -> None:
    browser.until(lambda: browser.text("chat-status").startswith("Answered"))


# --- chat


def test_an_answer_streams(browser: Browser, server: Served) -> None:
    browser.open(server.url)
    browser.id("system").send_keys(SYSTEM)
    ask(browser, "What is a radix tree?")
    lengths = set()
    speeds = set()

    def grown() -> bool:
        shown = browser.script(
            "return [...document.querySelectorAll('.message.live .text')].map(e => e.textContent.length)"
        )
        if shown and shown[0]:
            lengths.add(shown[0])
            speeds.add(browser.script("return document.querySelector('.message.live .figures b').textContent"))
        return len(lengths) >= 4

    browser.until(grown)
    assert browser.id("messages").get_attribute("aria-busy") == "true"
    assert len(speeds) > 1, "the speed does not move"
    browser.picture("chat-live")
    answered(browser)
    assert browser.id("messages").get_attribute("aria-busy") == "false"
    first = figures(browser)
    assert {"tokens/s", "first token", "tokens", "prompt", "cached"} <= set(first)
    assert int(first["prompt"]) > 200
    ask(browser, "And what is it good for?")
    answered(browser)
    again = figures(browser)
    assert int(again["cached"]) > 200, "the conversation was not found in the cache"
    assert len(browser.all(".message")) == 4
    browser.picture("chat")
    browser.id("clear").click()
    assert browser.all(".message") == []


def test_an_answer_can_be_stopped(browser: Browser, server: Served) -> None:
    browser.open(server.url)
    browser.id("max-tokens").clear()
    browser.id("max-tokens").send_keys("1500")
    ask(browser, "Write a very long story about a lighthouse, with many chapters.")
    browser.until(lambda: browser.all(".message.live .figures"))
    browser.id("stop").click()
    answered(browser)
    assert "ended by you" in figures(browser).values()
    assert browser.id("send").is_displayed()
    state = f"{server.url}/debug/state"
    browser.until(lambda: httpx.get(state).json()["server"]["gate"]["sequences"] == 0, 5)


def test_text_is_text(browser: Browser, server: Served) -> None:
    """Whatever is typed, or said by a model, is never markup."""
    browser.open(server.url)
    ask(browser, "<img src=x onerror=alert(1)><b id=bold>hi</b>")
    answered(browser)
    assert browser.all("#bold, .message img") == []
    assert "<img src=x" in browser.script("return document.querySelector('.message.user').textContent")


# --- load


def test_charts_are_drawn(browser: Browser, server: Served) -> None:
    browser.open(server.url, "load")
    clients = [Client(server.url, 150, f"Question {index}?") for index in range(4)]
    names = browser.script(
        "return [...document.querySelectorAll('.chart figcaption')].map(e => e.firstChild.textContent)"
    )
    assert {"Throughput", "Queue", "Step composition", "Time to first token", "Between tokens", "KV pages"} <= set(
        names
    )

    def drawn() -> bool:
        """Each chart has a line of several points, and that of the throughput goes up and down."""
        charts = browser.script(
            "return [...document.querySelectorAll('.chart')].map(chart => [...chart.querySelectorAll('path')]"
            ".map(path => path.getAttribute('d').replace(/[MZ]/g, '').split('L').map(each => each.split(' ')[1])))"
        )
        several = all(any(len(heights) > 2 for heights in chart) for chart in charts)
        return several and any(len(set(heights)) > 2 for heights in charts[0])

    browser.until(drawn)
    for client in clients:
        client.join(60)
    time.sleep(2.5)
    browser.picture("load")
    said = browser.script("return document.querySelector('.chart svg').getAttribute('aria-label')")
    assert said.startswith("Throughput, now: generated ")
    assert float(browser.text("vitals").split("Tokens/s")[1].split("Running")[0].replace(",", "")) >= 0
    browser.script("document.querySelector('.chart svg').focus()")
    browser.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    past = browser.script("return document.querySelector('.chart svg').getAttribute('aria-label')")
    assert "s ago: generated" in past
    browser.press(Keys.ESCAPE)
    assert ", now:" in browser.script("return document.querySelector('.chart svg').getAttribute('aria-label')")
    browser.script("document.querySelector('[name=span][value=\"300\"]').click()")
    assert "5 min ago" in browser.script("return document.querySelector('.chart svg').textContent")


# --- cache


def test_the_tree_is_shown(browser: Browser, server: Served) -> None:
    for index in range(3):
        Client(server.url, 24, f"Question {index}?").join(60)
    browser.open(server.url, "cache")
    bars = browser.until(lambda: browser.all("#tree .run"))
    assert len(bars) >= 4
    assert browser.all("#tree .run.h1, #tree .run.h2, #tree .run.h3"), "no run was hit"
    assert browser.all("#most-hit td.act button")
    label = browser.id("pages").get_attribute("aria-label")
    assert "free" in label
    painted = browser.script(
        "const canvas = document.getElementById('pages');"
        "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        "return new Set(new Uint32Array(data.buffer)).size"
    )
    assert painted >= 3, "the map shows no two kinds of pages"
    browser.picture("cache")

    def ticks() -> list[str]:
        code = "return [...document.querySelectorAll('#tree text:not(.label)')].map(e => e.textContent)"
        found: list[str] = browser.script(code)
        return found

    whole = ticks()
    assert whole[0] == "0 tokens"
    browser.all("#most-hit td.act button")[0].click()
    browser.until(lambda: "hit" in browser.text("tree-facts"))
    browser.script("document.querySelector('#tree svg').focus()")
    browser.press(Keys.ARROW_RIGHT)
    inner = browser.text("tree-facts")
    assert not inner.startswith("Tokens 0 ")
    browser.press(Keys.ENTER)
    time.sleep(0.5)
    assert ticks() != whole
    browser.picture("cache-zoomed")
    browser.press(Keys.ESCAPE, Keys.ESCAPE, Keys.ESCAPE)
    time.sleep(0.5)
    assert ticks()[0] == "0 tokens"
    assert not browser.id("zoom-out").is_enabled()


# --- requests


def test_a_request_is_aborted(browser: Browser, server: Served) -> None:
    browser.open(server.url, "requests")
    client = Client(server.url, 1500, id="to-be-ended")
    other = Client(server.url, 100, "What is snow?", id="not-to-be-ended")
    row = "//table[@id='requests']//tr[td[text()='to-be-ended']]"
    browser.until(lambda: browser.driver.find_elements(By.XPATH, row))
    browser.until(lambda: "decode" in browser.text("sequences"))
    browser.picture("requests")
    button = browser.driver.find_element(By.XPATH, f"{row}//button")
    browser.script("arguments[0].focus()", button)
    browser.press(Keys.ENTER)
    assert button.text == "Really abort?"
    time.sleep(1.2)  # the table was brought up to date: the question must still stand
    assert button.text == "Really abort?"
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.text("abort-status") == "to-be-ended is aborted")
    browser.until(lambda: not browser.driver.find_elements(By.XPATH, row))
    client.join(10)
    assert json.loads(client.events[-1])["error"]["code"] == "aborted"
    assert len(client.events) > 3
    other.join(60)
    assert other.events[-1] == "[DONE]"
    browser.until(lambda: "No request is under way" in browser.text("requests"))


# --- keys


def test_keys_are_asked_for_and_kept_in_the_tab(browser: Browser, engine_for: Callable[..., Any]) -> None:
    browser.expected = ("401 (Unauthorized)",)
    with served(engine_for("llama")[1].path, "--api-key", "sk-user", "--admin-key", "sk-admin") as server:
        browser.open(server.url, "requests")
        assert browser.text("status") == "locked"
        browser.until(lambda: browser.id("trouble").is_displayed())
        browser.all("#trouble button")[0].click()
        browser.id("api-key").send_keys("sk-user")
        browser.press(Keys.ENTER)
        browser.until(lambda: browser.text("status") == "ready")
        browser.until(lambda: "admin key" in browser.text("trouble"))
        browser.picture("keys-wanted")
        browser.id("open-keys").click()
        browser.id("admin-key").send_keys("sk-admin")
        browser.picture("keys")
        browser.press(Keys.ENTER)
        browser.until(lambda: "No request is under way" in browser.text("requests"))
        assert not browser.id("trouble").is_displayed()
        browser.view("chat")
        ask(browser, "hello")
        answered(browser)
        assert browser.script("return [localStorage.length, document.cookie, location.search]") == [0, "", ""]
        kept = browser.script("return Object.values(sessionStorage)")
        assert {"sk-user", "sk-admin"} <= set(kept)
        browser.id("open-keys").click()
        browser.id("forget-keys").click()
        assert not {"sk-user", "sk-admin"} & set(browser.script("return Object.values(sessionStorage)"))
        browser.until(lambda: browser.text("status") == "locked")
        browser.driver.get("about:blank")  # it would go on asking a server that is gone


# --- for everybody

CONTRAST = """
const values = (text) => text.match(/[\\d.]+/g).map(Number);
const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const [r, g, b, a = 1] = values(getComputedStyle(node).backgroundColor);
    if (a === 1) return [r, g, b];
  }
  return [255, 255, 255];
};
const found = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const node = texts.currentNode.parentElement;
  const box = node.getBoundingClientRect();
  const seen = texts.currentNode.textContent.trim() && node.checkVisibility() && box.width > 1;
  if (!seen || node.closest("svg, script, option, :disabled")) continue;
  const [one, other] = [light(values(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => a - b);
  found.push([Math.round(100 * (other + 0.05) / (one + 0.05)) / 100, node.textContent.slice(0, 40)]);
}
return found.sort((a, b) => a[0] - b[0]);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser: Browser, server: Served, scheme: str) -> None:
    browser.media(scheme)
    Client(server.url, 16).join(60)
    browser.open(server.url)
    ask(browser, "Say hello.")
    answered(browser)
    ground = browser.script("return getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, re.findall(r"\d+", ground))) < 300
    assert dark == (scheme == "dark")
    for view in VIEWS:
        browser.view(view)
        browser.until(lambda view=view: browser.text("cache-facts") or view != "cache")
        found = browser.script(CONTRAST)
        assert len(found) > 20
        assert found[0][0] >= 4.5, found[0]
        browser.picture(f"{view}-{scheme}")


def test_the_theme_can_be_chosen(browser: Browser, server: Served) -> None:
    browser.open(server.url)
    ground = lambda: browser.script("return getComputedStyle(document.body).backgroundColor")  # noqa: E731
    seen = []
    for _ in range(3):
        seen.append((browser.text("theme"), ground()))
        browser.id("theme").click()
    assert [word for word, _ in seen] == ["Theme auto", "Theme light", "Theme dark"]
    assert seen[0][1] == seen[1][1] != seen[2][1]
    browser.script("sessionStorage.clear()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser: Browser, server: Served, scheme: str) -> None:
    browser.media(scheme)
    browser.size(360, 740)
    browser.open(server.url)
    client = Client(server.url, 1500, id="a" * 128)
    ask(browser, "Write a line of code, and a word of " + "a" * 80)
    answered(browser)
    for view in VIEWS:
        browser.view(view)
        browser.until(
            lambda view=view: browser.all({"cache": "#tree .run", "requests": "#requests td"}.get(view, "h1"))
        )
        wide = browser.script(
            "return [...document.querySelectorAll('body *')].filter(e => e.checkVisibility()"
            " && !e.closest('pre, .scroll, svg, .hidden') && e.getBoundingClientRect().right > innerWidth + 1"
            " && getComputedStyle(e).position !== 'absolute').map(e => e.outerHTML.slice(0, 80))"
        )
        assert wide == []
        assert browser.script("return document.documentElement.scrollWidth") == 360
        browser.picture(f"phone-{view}-{scheme}")
    httpx.post(f"{server.url}/debug/abort", json={"id": "a" * 128})
    client.join(60)


def test_the_keyboard_reaches_everything(browser: Browser, server: Served) -> None:
    """In an order that makes sense, and one sees where one is."""
    for view, wanted in (
        ("chat", {"messages", "prompt", "send", "model", "system", "temperature", "max-tokens", "seed", "clear"}),
        ("load", {"1 min"}),
        ("cache", set()),
        ("requests", set()),
    ):
        browser.open(server.url, view)
        reached = []
        for _ in range(40):
            browser.press(Keys.TAB)
            name, outline = browser.script(
                "const e = document.activeElement; const shown = e.matches('[type=radio]') ? e.parentElement : e;"
                "return [e.id || e.textContent.trim() || e.parentElement.textContent,"
                " e === document.body ? 'body' : getComputedStyle(shown).outlineStyle]"
            )
            if outline == "body":
                break
            assert outline != "none", f"the focus on {name} cannot be seen"
            reached.append(name)
        assert reached[:5] == ["Skip to the content", "Chat", "Load", "Cache", "Requests"]
        assert {"open-keys", "theme"} | wanted <= set(reached)
        names = browser.script(
            "return [...document.querySelectorAll('button, a, input, select, textarea, [role=img], summary')].filter("
            "e => e.checkVisibility() && !(e.ariaLabel || e.textContent.trim() || e.labels?.length))"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        assert names == [], "what has no name"


def test_motion_can_be_turned_off(browser: Browser, server: Served) -> None:
    browser.media(motion="reduce")
    browser.open(server.url)
    moving = (
        "return [...document.querySelectorAll('*')].filter(e => getComputedStyle(e).animationName !== 'none'"
        " || getComputedStyle(e).transitionDuration !== '0s').length"
    )
    assert browser.script(moving) == 0
    browser.media()
    assert browser.script(moving) > 0


def test_it_says_when_the_engine_or_the_server_is_gone(browser: Browser, engine_for: Callable[..., Any]) -> None:
    browser.expected = ("503", "net::ERR_CONNECTION_REFUSED", "net::ERR_CONNECTION_RESET", "net::ERR_EMPTY_RESPONSE")
    with served(engine_for("llama")[1].path) as server:
        browser.open(server.url)
        assert browser.text("status") == "ready"
        os.kill(server.engine_pid, signal.SIGSTOP)  # it is found out, and replaced, after some seconds
        seen = set()

        def replaced() -> bool:
            seen.add(browser.text("status"))
            return "restarting" in seen and browser.text("status") == "ready"

        browser.until(replaced)
    browser.until(lambda: browser.text("status") == "no connection")
    browser.until(lambda: "cannot be reached" in browser.text("trouble"))
