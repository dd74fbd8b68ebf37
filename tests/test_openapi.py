"""The API's description: complete, true, and readable without asking anybody for anything."""

from __future__ import annotations

import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from test_frontend_text import CHATML
from test_server_api import BPE, ScriptedEngine, drive, strict
from tricorn.frontend.generate import Frontend
from tricorn.frontend.template import ChatTemplate
from tricorn.server import schema
from tricorn.server.app import ServerOptions, create_app

STATE = tempfile.TemporaryDirectory()
APP = create_app(
    Frontend(BPE, ChatTemplate(CHATML, BPE), ScriptedEngine([5, 6, 7])),
    ServerOptions(name="m", state_dir=Path(STATE.name)),
)


def described() -> dict[str, Any]:
    async def work(http: httpx.AsyncClient) -> Any:
        answer = await http.get("/openapi.json")
        assert answer.headers["content-type"] == "application/json"
        return strict(answer.text)

    found: dict[str, Any] = drive(work, ScriptedEngine())
    return found


def test_every_route_is_described() -> None:
    paths = described()["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert found == {(each.method, each.path.replace(":path}", "}")) for each in APP.state.api.operations}
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(set(names)) == len(names)
    for methods in paths.values():
        for operation in methods.values():
            assert operation["summary"]
            assert "200" in operation["responses"]


def test_every_field_is_described() -> None:
    whole = described()
    chat = whole["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(chat["properties"]) == {*schema.Sampling.__struct_fields__, *schema.Chat.__struct_fields__}
    assert chat["required"] == ["messages"]
    assert {"type": "number", "minimum": 0.0, "maximum": 2.0} in chat["properties"]["temperature"]["anyOf"]
    for name in schema.REFUSED:
        assert f"`{name}`" in whole["info"]["description"]
    text = str(whole)
    for ref in set(re.findall(r"#/components/schemas/([\w.-]+)", text)):
        assert ref in whole["components"]["schemas"]


class Page(HTMLParser):
    """What a browser would fetch, and the text that it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "link", "iframe", "object")
        self.outside += [value or "" for name, value in attrs if name in ("src", "href", "style", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_complete_and_alone() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        answer = await http.get("/docs")
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert len(answer.content) < 200_000
        page = Page()
        page.feed(answer.text)
        assert all(link == "openapi.json" or link.startswith("#") for link in page.outside)
        assert "url(" not in answer.text
        for operation in APP.state.api.operations:
            assert operation.path.replace(":path}", "}") in page.text
        for name in (*schema.Sampling.__struct_fields__, *schema.REFUSED):
            assert name in page.text
        assert "prefers-color-scheme:dark" in answer.text

    drive(work, ScriptedEngine())


SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@SCHEMA.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_makes_the_server_fail(case: schemathesis.Case) -> None:
    """Whatever follows the document, and what breaks it, is answered by something else than a failure."""
    answer = case.call()
    if not (case.path in ("/v2/health/ready", "/ready") and answer.status_code == 503):
        case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])
    if answer.status_code >= 400:
        assert "error" in answer.json() or answer.headers["content-type"] != "application/json"


def test_examples_of_errors_are_what_the_server_says() -> None:
    whole = described()

    async def work(http: httpx.AsyncClient) -> None:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v2/models/m/infer"):
            place = path.replace("/m/", "/{model}/")
            example = whole["paths"][place]["post"]["responses"]["400"]["content"]["application/json"]["example"]
            answer = await http.post(path, content=b"{", headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.json().keys() == example.keys()

    drive(work, ScriptedEngine())


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_the_description_is_open(path: str) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        assert (await http.get(path)).status_code == 200

    drive(work, ScriptedEngine(), api_keys=("sk-any",))
