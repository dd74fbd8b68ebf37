"""The console: what its files may hold, how they are served, and what it asks the server for beside the API, which is
the tree as a picture and an end to a request. In a browser: test_console_browser.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from served import Served, served
from test_cache import get, put, tokens
from test_server_api import CHAT, HI, ScriptedEngine, drive
from tricorn.cache.pool import PagePool
from tricorn.cache.radix import RadixTree
from tricorn.request import Namespace
from tricorn.server.console import FOLDER

PLAIN = "/v1/completions"
FILES = sorted(path.name for path in FOLDER.iterdir())
STYLE = (FOLDER / "style.css").read_text()


# --- the files


def test_the_page_asks_nobody_else() -> None:
    """Every file that a file names is there, and nothing leads out of the server."""
    page = (FOLDER / "index.html").read_text()
    named = re.findall(r"(?:src|href)=\"(?!#)([^\"]+)\"", page)
    for name in FILES:
        text = (FOLDER / name).read_text()
        outside = set(re.findall(r"\w+://[^\s\"'`)]+", text))
        assert outside <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"url\(|@import", text), name
        if name.endswith(".js"):
            named += [f"console/{each.removeprefix('./')}" for each in re.findall(r"from \"([^\"]+)\"", text)]
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", text), (
                name
            )
            assert not re.search(r"localStorage|indexedDB|cookie", text), name
    assert {each.removeprefix("console/") for each in named} == {*FILES} - {"index.html"}
    assert not re.search(r"<style|style=|\son\w+=|<script(?! type=\"module\" src=)", page)


def test_the_files_are_served_as_what_they_are() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        for path in ("/console", *(f"/console/{name}" for name in FILES)):
            answer = await http.get(path)
            assert answer.status_code == 200
            assert (
                answer.headers["content-type"].split(";")[0]
                == kinds[path.rpartition(".")[2].replace("/console", "html")]
            )
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-cache"
            tag = answer.headers["etag"]
            for known in (tag, f'"other", W/{tag}'):
                again = await http.get(path, headers={"if-none-match": known})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
                assert "content-length" not in again.headers
            assert (await http.get(path, headers={"if-none-match": '"other"'})).content == answer.content
        for path in ("/console/none.js", "/console/..%2Fconsole.py", "/console/%2Fetc%2Fpasswd", "/console/"):
            assert (await http.get(path)).status_code == 404

    drive(work, ScriptedEngine(), api_keys=("sk-any",), admin_key="sk-admin")  # it is open: it holds no data


def colours() -> dict[str, tuple[str, str]]:
    """The stylesheet's colours by name, for light and dark."""
    return {
        name: (light, dark) for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", STYLE)
    }


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_contrast(scheme: int) -> None:
    """WCAG AA: 4.5 for text, 3 for what must be seen to use or understand the page."""
    found = {name: pair[scheme] for name, pair in colours().items()}
    assert round(contrast("#000000", "#ffffff"), 2) == 21
    texts = {
        "page": ("text", "muted"),
        "surface": ("text", "muted", "bad"),
        "sunken": ("text", "muted", "bad"),
        "accent": ("on-accent",),
        "h0": ("text",),
        "h1": ("text",),
        "h2": ("text",),
        "h3": ("on-accent",),
    }
    shapes = {
        "page": ("accent", "control"),
        "surface": ("accent", "control", "good", "warn", "bad", "s1", "s2", "s3", "s4", "h3"),
        "cell": ("s1", "s2", "s4"),
    }
    for least, pairs in ((4.5, texts), (3.0, shapes)):
        for ground, fronts in pairs.items():
            for front in fronts:
                assert contrast(found[front], found[ground]) >= least, (front, ground)
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE)) - {"mono"}
    assert used == set(found), "a colour that is not defined, or not used"
    rest = re.sub(r"--[\w-]+: light-dark\(.*", "", STYLE)
    assert set(re.findall(r"#[0-9a-f]{3,8}\b", rest)) == {"#0008"}, "a colour that has no name"


# --- an end to a request


def test_the_operator_ends_a_stream() -> None:
    engine = ScriptedEngine([5] * 250, delay=0.01)

    async def work(http: httpx.AsyncClient) -> None:
        body = {"messages": HI, "stream": True, "max_tokens": 150}
        ended = asyncio.create_task(http.post(CHAT, json=body, headers={"x-request-id": "mine"}))
        other = asyncio.create_task(http.post(CHAT, json=body, headers={"x-request-id": "other"}))
        await asyncio.sleep(0.3)
        said = await http.post("/debug/abort", json={"id": "mine"})
        assert (said.status_code, said.json()["aborted"]["id"]) == (200, "mine")
        *events, last = [line[6:] for line in (await ended).text.splitlines() if line]
        assert len(events) > 3
        assert all(json.loads(event)["choices"] for event in events)
        assert json.loads(last)["error"]["code"] == "aborted"
        assert (await other).text.endswith("data: [DONE]\n\n")
        assert engine.aborted == [engine.requests[0].id]
        assert 'finished_reason="abort",model_name="m"} 1.0' in (await http.get("/metrics")).text
        assert (await http.post("/debug/abort", json={"id": "mine"})).status_code == 404

    drive(work, engine)


ASKED = {
    PLAIN: {"prompt": "x", "max_tokens": 200},
    "/v1/messages": {"model": "m", "messages": HI, "max_tokens": 200},
    "/api/chat": {"model": "m", "messages": HI, "stream": False, "options": {"num_predict": 200}},
}


@pytest.mark.parametrize("path", ASKED)
def test_what_is_ended_is_not_asked_again(path: str) -> None:
    """Clients repeat a request by themselves after some statuses; this is none of them, whatever the protocol."""

    async def work(http: httpx.AsyncClient) -> None:
        ended = asyncio.create_task(http.post(path, json=ASKED[path]))
        await asyncio.sleep(0.3)
        (live,) = [
            each for each in (await http.get("/debug/state")).json()["server"]["requests"] if each["route"] == path
        ]
        assert (await http.post("/debug/abort", json={"number": live["number"]})).status_code == 200
        answer = await ended
        assert answer.status_code == 403
        assert "operator" in answer.text

    drive(work, ScriptedEngine([5] * 250, delay=0.01))


def test_ends_that_are_refused() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        running = [
            asyncio.create_task(
                http.post(PLAIN, json={"prompt": "x", "max_tokens": 60}, headers={"x-request-id": "twin"})
            )
            for _ in range(2)
        ]
        await asyncio.sleep(0.2)
        for body, status in (
            ({}, 400),
            ({"id": "twin", "number": 1}, 400),
            ({"number": "1"}, 400),
            ([], 400),
            ({"id": "nobody"}, 404),
            ({"number": 10**9}, 404),
            ({"id": "twin"}, 409),
        ):
            answer = await http.post("/debug/abort", json=body)
            assert answer.status_code == status, body
        for number in re.findall(r"\d+", answer.json()["error"]["message"].partition("number")[2]):
            assert any(
                each["number"] == int(number) for each in (await http.get("/debug/state")).json()["server"]["requests"]
            )
        # A page of another origin can send this much without asking.
        for kind in ({}, {"content-type": "text/plain"}):
            answer = await http.post("/debug/abort", content=b'{"id": "twin"}', headers=kind)
            assert answer.status_code == 415
        assert [(await each).status_code for each in running] == [200, 200]

    drive(work, ScriptedEngine([5] * 100, delay=0.01))


# --- the tree as a picture


def test_the_picture_of_a_tree() -> None:
    tree = RadixTree(PagePool(64))
    stem = list(range(100, 148))
    put(tree, tokens(*stem, *range(40)))
    put(tree, tokens(*stem, *range(1000, 1020)), retention=80, pinned_until=tree._clock() + 60)
    put(tree, tokens(7, 8, 9))
    for _ in range(3):
        get(tree, tokens(*stem, *range(1000, 1020)))
    match = tree.match(Namespace(), tokens(*stem, 5))
    picture = tree.picture(100, 1000)
    runs = picture["runs"]
    assert picture["pages"] == sum(run["pages"] for run in runs) == len(tree.pages())
    assert sum(run["tokens"] for run in runs) == sum(tree.pages().values()) == 48 + 40 + 20 + 3
    first = runs[0]
    assert (first["parent"], first["pages"], first["tokens"], first["hits"], first["holders"]) == (-1, 3, 48, 4, 1)
    assert (first["idle"], first["retention"]) == (0, 80)
    assert 50 < first["pinned"] <= 60
    branches = {run["tokens"]: run for run in runs if run["parent"] == 0}
    assert {size: (run["hits"], run["holders"], run["retention"]) for size, run in branches.items()} == {
        20: (3, 0, 80),
        40: (0, 0, 50),
    }
    assert [run["hits"] for run in runs] == sorted((run["hits"] for run in runs), reverse=True)
    tree.pool.release(match.pages)


def test_the_picture_is_bounded() -> None:
    tree = RadixTree(PagePool(400))
    for index in range(90):
        put(tree, tokens(index, *range(1, 64)))
    wanted = tokens(50, *range(1, 64))
    get(tree, wanted)
    for limit, visits in ((1000, 1000), (10, 1000), (1000, 100), (1000, 5), (1, 1)):
        picture = tree.picture(limit, visits)
        shown = sum(run["pages"] for run in picture["runs"])
        assert picture["pages"] == 360
        assert len(picture["runs"]) <= limit
        assert 0 < shown <= min(360, visits + 1)
        assert all(run["parent"] < place for place, run in enumerate(picture["runs"]))
        if visits >= 90:
            assert picture["runs"][0]["hits"] == 1
    assert RadixTree(PagePool(1)).picture(10, 10) == {"pages": 0, "runs": []}


def test_the_tree_is_shown_when_asked_for() -> None:
    asked = []

    class Engine(ScriptedEngine):
        async def state(self, *, tree: bool = False) -> dict[str, Any]:
            asked.append(tree)
            return {}

    async def work(http: httpx.AsyncClient) -> None:
        for query in ("", "?tree=0", "?tree=1", "?x=y"):
            assert (await http.get(f"/debug/state{query}")).status_code == 200
        for query in ("?tree=2", "?tree=", "?tree=1&tree=1"):
            answer = await http.get(f"/debug/state{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tree")

    drive(work, Engine())
    assert asked == [False, False, True, False]


@pytest.fixture(scope="module")
def server(engine_for: Callable[..., Any]) -> Any:
    with served(engine_for("llama")[1].path) as running:
        yield running


def test_each_gets_the_state_that_was_asked_for(server: Served) -> None:
    """From a real engine, many at once: nobody gets another's answer, and no answer holds a token."""

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            prompt = [77] * 100
            for _ in range(2):
                answer = await http.post(PLAIN, json={"prompt": prompt, "max_tokens": 2, "temperature": 0})
                assert answer.status_code == 200
            paths = [f"/debug/state?tree={index % 2}" for index in range(12)]
            states = [answer.json() for answer in await asyncio.gather(*map(http.get, paths))]
            for index, state in enumerate(states):
                assert ("tree" in state["engine"]) == (index % 2 == 1)
            runs = states[1]["engine"]["tree"]["runs"]
            assert runs[0]["hits"] == 1
            assert set(runs[0]) == {
                "page",
                "parent",
                "pages",
                "tokens",
                "hits",
                "holders",
                "idle",
                "retention",
                "pinned",
            }

    asyncio.run(work())
