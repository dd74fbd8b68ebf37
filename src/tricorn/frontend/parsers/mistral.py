"""Mistral: `[TOOL_CALLS]` and a list of objects (LIST); since 2025 `[TOOL_CALLS]`, the name, `[ARGS]` and the
arguments, for each call anew (NAMED). Ids of calls have nine letters and digits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tricorn.frontend.parsers.calls import Form, Format, MarkerIds, arguments, named, object_tag, one_or_more
from tricorn.frontend.tools import Tools

CALLS, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


def _mark(text: str, marker: MarkerIds) -> Format:
    """A marker as it is written in this vocabulary."""
    id = marker(text)
    return {"type": "const_string", "value": text} if id is None else {"type": "token", "token": id}


def _begun(tags: list[Format], once: bool, marker: MarkerIds) -> Format:
    """Words and tags that begin with `[TOOL_CALLS]`, at most one if `once`."""
    if marker(CALLS) is None:
        kind: dict[str, Any] = {"type": "triggered_tags", "triggers": [CALLS]}
        tags = [{**tag, "begin": CALLS} for tag in tags]
    else:
        kind = {"type": "token_triggered_tags"}
        tags = [{**tag, "begin": _mark(CALLS, marker)} for tag in tags]
    return {**kind, "tags": tags, "stop_after_first": once}


def _list(tools: Tools, marker: MarkerIds) -> Format:
    objects = one_or_more([object_tag(tool, "arguments") for tool in tools.open], tools, ", ")
    elements = [{"type": "const_string", "value": "["}, objects, {"type": "const_string", "value": "]"}]
    content = {"type": "sequence", "elements": elements}
    if tools.choice == "required":
        return {"type": "sequence", "elements": [_mark(CALLS, marker), content]}
    return _begun([{"type": "tag", "content": content, "end": ""}], once=True, marker=marker)


def _named(tools: Tools, marker: MarkerIds) -> Format:
    def content(name: str, schema: Format) -> Format:
        parts = [{"type": "const_string", "value": name}, _mark(ARGUMENTS, marker), schema]
        return {"type": "sequence", "elements": parts}

    tags = [{"type": "tag", "content": content(tool.name, arguments(tool)), "end": ""} for tool in tools.open]
    if tools.choice == "required":
        tags = [{**tag, "begin": _mark(CALLS, marker) if marker(CALLS) is not None else CALLS} for tag in tags]
        return one_or_more(tags, tools, "")
    return _begun(tags, once=not tools.parallel, marker=marker)


LIST = Form(
    name="mistral",
    fits=lambda template: CALLS in template,
    begin=CALLS,
    header=named("arguments"),
    tail=re.compile(r"\s*\}[\s,\]]*"),
    grammar=_list,
    markers=(CALLS,),
    id_prefix="",
    id_length=9,
)

NAMED = replace(
    LIST,
    name="mistral-named",
    fits=lambda template: CALLS in template and ARGUMENTS in template,
    header=re.compile(
        r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[^\s\[\]{}\"]+)(?:\[CALL_ID\][A-Za-z0-9]+)?\[ARGS\]\s*(?=\{)"
    ),
    tail=re.compile(r""),
    grammar=_named,
    markers=(CALLS, ARGUMENTS, "[CALL_ID]"),
)
