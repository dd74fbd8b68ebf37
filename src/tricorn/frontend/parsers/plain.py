"""For models whose chat template knows nothing of tools: the answer is an object of name and arguments. The tools stand
in the system's message, calls and results become words.
"""

from __future__ import annotations

import json
import re

from tricorn.frontend.parsers.calls import Form, Format, MarkerIds, calls_or_words, named, object_tag, one_or_more
from tricorn.frontend.template import PART_JOINER, Message
from tricorn.frontend.tools import Tools


def _grammar(tools: Tools, marker: MarkerIds) -> Format:
    calls = one_or_more([object_tag(tool, "arguments") for tool in tools.open], tools, "\n")
    return calls if tools.choice == "required" else calls_or_words(calls)


FORM = Form(
    name="plain",
    fits=lambda template: True,
    begin="",
    header=named("arguments|parameters"),
    tail=re.compile(r"\s*\}[\s,;\]]*"),
    grammar=_grammar,
    taught=False,
)


def explained(messages: list[Message], tools: Tools | None) -> list[Message]:
    """The conversation in words that any template knows, with `tools` explained at its beginning."""
    turns: list[Message] = []
    for message in map(_worded, messages):
        if turns and message["role"] == turns[-1]["role"] == "user":  # many templates want turns to alternate
            turns[-1] = {**message, "content": turns[-1]["content"] + PART_JOINER + message["content"]}
        else:
            turns.append(message)
    if tools is None:
        return turns
    system = turns.pop(0)["content"] + "\n\n" if turns and turns[0]["role"] == "system" else ""
    return [{"role": "system", "content": system + _manual(tools)}, *turns]


def _manual(tools: Tools) -> str:
    listed = "\n".join(json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools.offered)
    several = " Call several by one such object a line." if tools.parallel else ""
    return (
        "You can call these functions, given with the JSON schemas of their parameters:\n"
        f"{listed}\n"
        'To call one, answer with nothing but {"name": <its name>, "arguments": <an object>}.'
        f"{several} Its result comes as the next message. Otherwise answer in words."
    )


def _worded(message: Message) -> Message:
    """A message that is only words. What a template may not know, such as the role of a tool, goes away."""
    if message["role"] == "tool":
        named = f" of {message['name']}" if isinstance(message.get("name"), str) else ""
        return {"role": "user", "content": f"Result{named}: {message['content']}"}
    if not message.get("tool_calls"):
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    words = [message["content"]] if message["content"] else []
    return {"role": message["role"], "content": "\n".join([*words, *calls])}
