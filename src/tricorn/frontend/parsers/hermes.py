"""Hermes and Qwen: `<tool_call>` and `</tool_call>` around an object of name and arguments, one after the other."""

from __future__ import annotations

import re

from tricorn.frontend.parsers.calls import Form, Format, MarkerIds, named, object_tag, one_or_more
from tricorn.frontend.tools import Tools

BEGIN, END = "<tool_call>", "</tool_call>"


def _fits(template: str) -> bool:
    return BEGIN in template and "<function=" not in template


def _grammar(tools: Tools, marker: MarkerIds) -> Format:
    tags = [object_tag(tool, "arguments", BEGIN + "\n", "\n" + END) for tool in tools.open]
    if tools.choice == "required":
        return one_or_more(tags, tools, "\n")
    return {"type": "triggered_tags", "triggers": [BEGIN], "tags": tags, "stop_after_first": not tools.parallel}


FORM = Form(
    name="hermes",
    fits=_fits,
    begin=BEGIN,
    header=named("arguments|parameters"),
    tail=re.compile(rf"\s*\}}\s*{END}"),
    end=END,
    grammar=_grammar,
)
