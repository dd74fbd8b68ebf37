"""Tools that a model may call, whatever protocol they came by."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from tricorn.frontend.errors import BadRequest

MOST_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class Tool(msgspec.Struct, frozen=True):
    """A function by its name. `parameters` is a JSON schema of an object. With `strict` a schema that cannot be
    enforced is refused; without it the arguments are then any object.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False

    @property
    def shown(self) -> dict[str, Any]:
        """As a chat template takes it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}

    @property
    def schema(self) -> dict[str, Any]:
        """That of the arguments: an object always, with no members when none are named."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters if "type" in self.parameters else {"type": "object", **self.parameters}


class Tools(msgspec.Struct, frozen=True):
    """What is offered, and whether it must be used: "required" is at least one call, of any of `callable` (None: all).
    Calls are one at a time unless `parallel`.
    """

    offered: tuple[Tool, ...]
    choice: Literal["auto", "required"] = "auto"
    callable: frozenset[str] | None = None
    parallel: bool = True

    @property
    def open(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        if self.callable is None:
            return self.offered
        return tuple(tool for tool in self.offered if tool.name in self.callable)


def check(tools: Tools) -> Tools:
    """Raises BadRequest naming what is wrong with the tools."""
    if len(tools.offered) > MOST_TOOLS:
        raise BadRequest(f"tools: {len(tools.offered)} are more than {MOST_TOOLS}", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools.offered):
        if not NAME.fullmatch(tool.name):
            raise BadRequest(
                f"tools[{index}]: {tool.name[:40]!r} is not a name of 1 to 128 letters, digits and signs of _.:/-",
                "tools",
            )
        if tool.name in names:
            raise BadRequest(f"tools[{index}]: {tool.name!r} is there twice", "tools")
        if tool.parameters.get("type", "object") != "object":
            raise BadRequest(f"tools[{index}]: the parameters must be of type object", "tools")
        names.add(tool.name)
    for name in tools.callable or ():
        if name not in names:
            raise BadRequest(f"tool_choice: there is no tool {name[:80]!r}", "tool_choice")
    if tools.callable is not None and not tools.callable:
        raise BadRequest("tool_choice: no tool may be called", "tool_choice")
    return tools
