"""Llama 3: the answer is an object of name and parameters; several are parted by semicolons."""

from __future__ import annotations

import re

from tricorn.frontend.parsers.calls import Form, Format, MarkerIds, calls_or_words, named, object_tag, one_or_more
from tricorn.frontend.tools import Tools


def _fits(template: str) -> bool:
    return "tools" in template and ("<|python_tag|>" in template or "ipython" in template)


def _grammar(tools: Tools, marker: MarkerIds) -> Format:
    calls = one_or_more([object_tag(tool, "parameters") for tool in tools.open], tools, "; ")
    return calls if tools.choice == "required" else calls_or_words(calls)


FORM = Form(
    name="llama3",
    fits=_fits,
    begin="",
    header=named("parameters|arguments"),
    tail=re.compile(r"\s*\}[\s;]*"),
    grammar=_grammar,
)
