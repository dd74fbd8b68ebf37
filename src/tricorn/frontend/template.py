"""Chat templates: messages to token ids, as the model's own Jinja template writes them.

Templates are data from a model file, so they run in Jinja's immutable sandbox, with the helpers that templates of the
Hugging Face hub expect (`raise_exception`, `strftime_now`, `tojson`, the `generation` tag). Strings of a client that
spell a marker stay plain text.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from tricorn.frontend.errors import BadRequest
from tricorn.frontend.tokenizer import Tokenizer
from tricorn.request import TricornError

Message = dict[str, Any]

RESERVED = frozenset(
    {"messages", "tools", "documents", "bos_token", "eos_token", "add_generation_prompt", "chat_template"}
)
"""Names of the template's scope that a client's `chat_template_kwargs` may not set."""

ROLES = frozenset({"system", "user", "assistant", "tool"})

PART_JOINER = "\n"
"""Stands between the text parts of one message."""


class ChatTemplate:
    """The template of one model. Raises TricornError when it cannot be compiled."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, eos_id: int | None = None) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TricornError(f"the model's chat template cannot be compiled: {error}") from error
        self.source = source
        self._tokenizer = tokenizer
        self._tokens = {
            name: tokenizer.special.get(-1 if id is None else id, "")
            for name, id in (("bos_token", tokenizer.bos_id), ("eos_token", eos_id))
        }

    def render(
        self,
        messages: list[Message],
        options: dict[str, Any] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        generate: bool = True,
    ) -> str:
        """The prompt's text. `messages` as `normalize` gives them; `generate` opens the assistant's turn.

        Raises BadRequest when the template refuses the messages.
        """
        scope = {
            **(options or {}),
            **self._tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": generate,
        }
        try:
            return self._template.render(scope)
        except BadRequest:
            raise
        except Exception as error:  # whatever a template does wrong with these messages
            raise BadRequest(f"the chat template cannot render these messages: {error}", "messages") from error

    def encode(
        self,
        messages: list[Message],
        options: dict[str, Any] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        limit: int | None = None,
        continuation: str = "",
    ) -> list[int]:
        """The prompt's ids, with the markers of the template and none from the content of a message. The assistant's
        turn begins with `continuation`.

        No BOS is added: a template writes its own. Raises BadRequest for a text above `limit` characters.
        """
        shielded = [_shield(message, self._tokenizer) for message in messages]
        variables, offered = _shield(options or {}, self._tokenizer), _shield(tools, self._tokenizer)
        text = self.render(shielded, variables, tools=offered) + self._tokenizer.shield(continuation)
        check_text(text, limit)
        return self._tokenizer.encode_shielded(text)


def check_text(text: str, limit: int | None) -> None:
    """Refuses, before any work is spent on it, what is not text or has more than `limit` characters."""
    if limit is not None and len(text) > limit:
        raise BadRequest(
            f"the prompt has {len(text)} characters, more than the {limit} that could fit the model's context",
            "prompt",
            "context_length_exceeded",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("the prompt holds a lone surrogate, which is not text", "prompt") from error


def normalize(messages: list[Message]) -> list[Message]:
    """Messages of the OpenAI API in the form that templates expect.

    Text parts are joined with a newline; a missing or null content becomes ""; the role "developer" is "system"; an
    empty list of tool calls goes away; arguments of tool calls become objects; a thought is the `reasoning_content`.
    Raises BadRequest naming the message's index.
    """
    if not messages:
        raise BadRequest("messages must hold at least one message", "messages")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize(message: Message, place: str) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"{place} must be an object with role and content", place)
    role = message.get("role")
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{place}.role must be one of system, developer, user, assistant, tool", f"{place}.role")
    result = {key: value for key, value in message.items() if value is not None}
    if "reasoning" in result:
        result.setdefault("reasoning_content", result.pop("reasoning"))
    calls = result.pop("tool_calls", None)
    if not isinstance(calls, list | None):
        raise BadRequest(f"{place}.tool_calls must be a list", f"{place}.tool_calls")
    content = result.get("content")
    if content is None and role != "assistant":
        raise BadRequest(f"{place}.content is missing", f"{place}.content")
    if calls:
        result["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return {**result, "role": role, "content": _content(content, f"{place}.content")}


def _content(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{place} must be a string or a list with at least one text part", place)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                f"{place}[{index}] must be a part of type text: this model reads text only", f"{place}[{index}]"
            )
    return PART_JOINER.join(part["text"] for part in content)


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{place} must hold a function with a name", place)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise BadRequest(
                f"{place}.function.arguments is not valid JSON: {error}", f"{place}.function.arguments"
            ) from error
    if not isinstance(arguments, dict):
        raise BadRequest(f"{place}.function.arguments must be a JSON object", f"{place}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _shield(value: Any, tokenizer: Tokenizer) -> Any:
    """`value` with every string in it shielded, roles (which are checked) included at no cost."""
    if isinstance(value, str):
        return tokenizer.shield(value)
    if isinstance(value, dict):
        return {_shield(key, tokenizer): _shield(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list):
        return [_shield(item, tokenizer) for item in value]
    return value


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it only encloses them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Without the HTML escapes of Jinja's own filter, and with other scripts as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise BadRequest(f"the chat template refuses these messages: {message}", "messages")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
