"""The API described: /openapi.json, made from the routes and the structs that read their bodies, and /docs, a page made
of it. Only the answers are written down here.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tricorn import __version__
from tricorn.server import schema
from tricorn.server.errors import HttpError
from tricorn.server.exchange import Dialect, Exchange
from tricorn.server.routes import Operation, Routes

Fields = dict[str, Any]
Groups = Mapping[str, tuple[Dialect, Routes]]
"""The protocols by name."""

REF = "#/components/schemas/{name}"

STATUSES = {
    400: "The request is at fault; the error names the field",
    401: "No key, or a wrong one",
    403: "Not from other machines",
    404: "No such model",
    408: "The request's time was over, or its body did not arrive",
    413: "The body is too large",
    415: "The content type must be application/json",
    429: "No room now, or the caller's rate is used up: Retry-After says when to ask again",
    503: "The engine is being started, or the server is about to stop",
}

# --- answers

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))


def _list(item: Fields) -> Fields:
    return {"type": "array", "items": item}


def _object(**fields: Fields) -> Fields:
    return {"type": "object", "properties": fields}


def _or_null(field: Fields) -> Fields:
    return {"anyOf": [field, {"type": "null"}]}


_USAGE = _object(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=_object(cached_tokens=INTEGER),
)
_TIMINGS = _object(
    queue_ms=NUMBER,
    cache_n=INTEGER,
    prompt_n=INTEGER,
    prompt_ms=NUMBER,
    prompt_per_second=NUMBER,
    predicted_n=INTEGER,
    predicted_ms=NUMBER,
    predicted_per_second=NUMBER,
)
_HEAD = {"id": STRING, "object": STRING, "created": INTEGER, "model": STRING}
_ENDED = {"index": INTEGER, "finish_reason": _or_null(STRING), "stop_reason": _or_null({"type": ["string", "integer"]})}
_CHAT_CHOICE = _object(message=_object(role=STRING, content=_or_null(STRING)), logprobs=_or_null(_object()), **_ENDED)
_CHOICE = _object(text=STRING, logprobs=_or_null(_object()), **_ENDED)
_VECTOR = {"anyOf": [_list(NUMBER), STRING]}
_EMBEDDED = {"prompt_eval_count": INTEGER, "total_duration": INTEGER, "load_duration": INTEGER}
_RESPONSE = _object(
    id=STRING,
    object=STRING,
    created_at=NUMBER,
    model=STRING,
    status=STRING,
    output=_list(_object(id=STRING, type=STRING, status=STRING)),
    usage=_object(
        input_tokens=INTEGER,
        input_tokens_details=_object(cached_tokens=INTEGER),
        output_tokens=INTEGER,
        output_tokens_details=_object(reasoning_tokens=INTEGER),
        total_tokens=INTEGER,
    ),
)
_MODEL = _object(id=STRING, object=STRING, created=INTEGER, owned_by=STRING, max_model_len=INTEGER)
_FILE = _object(id=STRING, object=STRING, bytes=INTEGER, created_at=INTEGER, filename=STRING, purpose=STRING)
_BATCH = _object(
    id=STRING,
    object=STRING,
    endpoint=STRING,
    status=STRING,
    input_file_id=STRING,
    output_file_id=_or_null(STRING),
    error_file_id=_or_null(STRING),
    request_counts=_object(total=INTEGER, completed=INTEGER, failed=INTEGER),
)
_TENSOR = _object(name=STRING, datatype=STRING, shape=_list(INTEGER), data=_list({}))
_BLOCK = _object(type=STRING, text=STRING)
_STATUS = _object(status=STRING)
_OLLAMA_END = {"done_reason": STRING, "eval_count": INTEGER, "prompt_eval_count": INTEGER, "total_duration": INTEGER}

ANSWERS: Mapping[str, Fields] = {
    "/v1/chat/completions": _object(**_HEAD, choices=_list(_CHAT_CHOICE), usage=_USAGE, timings=_TIMINGS),
    "/v1/completions": _object(**_HEAD, choices=_list(_CHOICE), usage=_USAGE, timings=_TIMINGS),
    "/v1/embeddings": _object(
        **_HEAD, data=_list(_object(object=STRING, index=INTEGER, embedding=_VECTOR)), usage=_USAGE, timings=_TIMINGS
    ),
    "/v1/responses": _RESPONSE,
    "/v1/responses/{id}": _RESPONSE,
    "/v1/models": _object(object=STRING, data=_list(_MODEL)),
    "/v1/models/{id}": _MODEL,
    "/v1/files": _FILE,
    "/v1/files/{id}": _FILE,
    "/v1/batches": _BATCH,
    "/v1/batches/{id}": _BATCH,
    "/v1/batches/{id}/cancel": _BATCH,
    "/health": _STATUS,
    "/ready": _STATUS,
    "/tokenize": _object(
        count=INTEGER, max_model_len=INTEGER, tokens=_list(INTEGER), token_strs=_or_null(_list(STRING))
    ),
    "/detokenize": _object(prompt=STRING),
    "/apply-template": _object(prompt=STRING),
    "/v1/chat/completions/input_tokens": _object(object=STRING, input_tokens=INTEGER),
    "/version": _object(version=STRING),
    "/health_generate": _STATUS,
    "/v1/messages": _object(
        id=STRING,
        type=STRING,
        role=STRING,
        model=STRING,
        content=_list(_BLOCK),
        stop_reason=_or_null(STRING),
        stop_sequence=_or_null(STRING),
        usage=_object(input_tokens=INTEGER, output_tokens=INTEGER, cache_read_input_tokens=INTEGER),
    ),
    "/v1/messages/count_tokens": _object(input_tokens=INTEGER),
    "/api/chat": _object(
        model=STRING, created_at=STRING, message=_object(role=STRING, content=STRING), done=BOOLEAN, **_OLLAMA_END
    ),
    "/api/generate": _object(model=STRING, created_at=STRING, response=STRING, done=BOOLEAN, **_OLLAMA_END),
    "/api/embed": _object(model=STRING, embeddings=_list(_list(NUMBER)), **_EMBEDDED),
    "/api/embeddings": _object(embedding=_list(NUMBER)),
    "/api/tags": _object(models=_list(_object(name=STRING, model=STRING, details=_object()))),
    "/api/version": _object(version=STRING),
    "/v2": _object(name=STRING, version=STRING, extensions=_list(STRING)),
    "/v2/models/{model}": _object(
        name=STRING, versions=_list(STRING), platform=STRING, inputs=_list(_TENSOR), outputs=_list(_TENSOR)
    ),
    "/v2/models/{model}/infer": _object(id=STRING, model_name=STRING, model_version=STRING, outputs=_list(_TENSOR)),
}
"""What a request that was served gets; the others get some JSON."""

FORMS: Mapping[tuple[str, str], Fields] = {
    ("POST", "/v1/files"): {
        **_object(file={"type": "string", "format": "binary"}, purpose={"type": "string", "enum": ["batch"]}),
        "required": ["file", "purpose"],
    }
}
"""The bodies that are not JSON."""

# --- the document


def document(groups: Groups, refused: Mapping[str, Any] = schema.REFUSED) -> Fields:
    """The OpenAPI document (3.1) of all routes."""
    structs = {struct for _, routes in groups.values() for operation in routes for struct in operation.reads}
    ordered = sorted(structs, key=lambda struct: (struct.__module__, struct.__name__))
    found, components = msgspec.json.schema_components(ordered, ref_template=REF)
    names = {struct: schema["$ref"].rpartition("/")[2] for struct, schema in zip(ordered, found, strict=True)}
    paths: dict[str, Fields] = {}
    for group, (dialect, routes) in groups.items():
        for operation in routes:
            read = [components[names[struct]] for struct in operation.reads]
            path = re.sub(r":path}", "}", operation.path)
            paths.setdefault(path, {})[operation.method.lower()] = _operation(group, dialect, operation, path, read)
    used = _closure(paths, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tricorn",
            "version": __version__,
            "description": "One model, under the APIs that its clients know. Unknown fields are ignored; known fields"
            " that would change an answer and are not honoured are refused with 400, unless they hold the value that"
            " asks for nothing: " + ", ".join(f"`{name}`" for name in sorted(refused)) + ".",
        },
        "tags": [{"name": group} for group in groups],
        "paths": paths,
        "components": {
            "schemas": {name: components[name] for name in sorted(used)},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "A key, if the server asks for keys."},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
                "admin": {"type": "http", "scheme": "bearer", "description": "The admin key."},
            },
        },
    }


def _operation(group: str, dialect: Dialect, operation: Operation, path: str, read: list[Fields]) -> Fields:
    security: dict[str, list[Fields]] = {
        "open": [],
        "key": [{"bearer": []}, {"header": []}, {}],
        "admin": [{"admin": []}],
    }
    described: Fields = {
        "tags": [group],
        "operationId": re.sub(r"\W+", "_", f"{operation.method.lower()}{path}").strip("_"),
        "summary": operation.about,
        "security": security[operation.access],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": STRING} for name in re.findall(r"{(\w+)}", path)
        ],
    }
    body = _body(read)
    if (operation.method, path) in FORMS:
        form = {"multipart/form-data": {"schema": FORMS[operation.method, path]}}
        described["requestBody"] = {"required": True, "content": form}
    if read:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    whole = ANSWERS.get(path, {})
    if operation.method == "GET" and path in ("/v1/files", "/v1/batches"):
        whole = _object(object=STRING, data=_list(whole), has_more=BOOLEAN)
    answer = {operation.gives: {"schema": whole if operation.gives == "application/json" else STRING}}
    if "stream" in body["properties"] or path.endswith("_stream"):
        answer[dialect.media.decode().partition(";")[0]] = {"schema": STRING}
    described["responses"] = {"200": {"description": "Served", "content": answer}}
    for status in _statuses(operation):
        example = dialect.error(HttpError(status, STATUSES[status], "max_tokens" if status == 400 else None))
        content = {"application/json": {"schema": _shape(example), "example": example}}
        described["responses"][str(status)] = {"description": STATUSES[status], "content": content}
    return described


def _statuses(operation: Operation) -> list[int]:
    barred: list[int] = {"open": [], "key": [401], "admin": [401, 403]}[operation.access]
    if operation.method == "GET":
        waits = re.search("ready|health", operation.path)
        return [*([404] if "{" in operation.path else []), *barred, *([503] if waits else [])]
    return sorted({400, 404, 408, 413, 415, 429, 503, *barred})


def _body(read: list[Fields]) -> Fields:
    """The fields of all structs that read one body."""
    properties = {name: field for struct in read for name, field in struct["properties"].items()}
    required = sorted({name for struct in read for name in struct.get("required", ())})
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _shape(value: Any) -> Fields:
    """A schema of what an example shows; null may be a string."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {name: _shape(item) for name, item in value.items()}}
    return {"type": ["string", "null"]}


def _closure(value: Any, components: Mapping[str, Fields]) -> set[str]:
    """The components that a part of the document leads to."""
    found: set[str] = set()
    left = re.findall(r"#/components/schemas/([\w.-]+)", msgspec.json.encode(value).decode())
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += re.findall(r"#/components/schemas/([\w.-]+)", msgspec.json.encode(components[name]).decode())
    return found


# --- the page

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--get:#0a7d5a;--post:#1f5fbf}
@media(prefers-color-scheme:dark){:root{--get:#4fd1a5;--post:#7fb0ff}}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{margin-bottom:0}h2{margin-top:2.5rem;border-bottom:1px solid var(--line)}
details{border:1px solid var(--line);border-radius:6px;margin:.4rem 0}
summary{cursor:pointer;padding:.45rem .7rem;display:flex;gap:.7rem;align-items:baseline;flex-wrap:wrap}
details>div{padding:.2rem .9rem .9rem;overflow-x:auto}
code{font:13px ui-monospace,monospace}.m{font-weight:700;min-width:3.6rem}
.GET{color:var(--get)}.POST{color:var(--post)}.DELETE{color:#c0392b}
.a{margin-left:auto;opacity:.7;font-size:13px}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--soft)}
p{max-width:48rem}
"""


def page(described: Fields) -> str:
    """The document for people: one file without scripts, which asks for nothing else."""
    schemas = described["components"]["schemas"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Tricorn API</title><style>{STYLE}</style><h1>Tricorn {html.escape(described['info']['version'])}</h1>",
        f"<p>{_prose(described['info']['description'])}<p>As JSON: <a href=openapi.json>openapi.json</a>.",
    ]
    for tag in described["tags"]:
        parts.append(f"<h2>{html.escape(tag['name'])}</h2>")
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    parts.append(_entry(path, method.upper(), operation, schemas))
    parts.append("<h2>Objects</h2>")
    for name, struct in schemas.items():
        about = _prose(struct.get("description", ""))
        parts.append(
            f"<details id='{html.escape(name)}'><summary><code>{html.escape(_short(name))}</code></summary>"
            f"<div><p>{about}{_table(struct)}</div></details>"
        )
    return "\n".join(parts)


def _entry(path: str, method: str, operation: Fields, schemas: Mapping[str, Fields]) -> str:
    access = "admin key" if {"admin": []} in operation["security"] else "key" if operation["security"] else "open"
    parts = [
        f"<details><summary><span class='m {method}'>{method}</span><code>{html.escape(path)}</code>"
        f"<span>{_prose(operation['summary'])}</span><span class=a>{access}</span></summary><div>"
    ]
    if "requestBody" in operation:
        ((kind, content),) = operation["requestBody"]["content"].items()
        parts.append(f"<h4>Body <code>{kind}</code></h4>{_table(content['schema'])}")
    parts.append("<h4>Answers</h4><table>")
    for status, response in operation["responses"].items():
        kinds = ", ".join(f"<code>{html.escape(kind)}</code>" for kind in response["content"])
        parts.append(f"<tr><td><b>{status}</b><td>{_prose(response['description'])}<td>{kinds}")
    answer = operation["responses"]["200"]["content"].get("application/json", {}).get("schema", {})
    fields = _table(answer) if "properties" in answer else ""
    return "".join((*parts, "</table>", fields, "</div></details>"))


def _table(struct: Fields) -> str:
    rows = [
        f"<tr><td><code>{html.escape(name)}</code>{' *' if name in struct.get('required', ()) else ''}"
        f"<td>{_kind(field)}<td>{_prose(field.get('description', ''))}"
        for name, field in struct.get("properties", {}).items()
    ]
    return f"<table><tr><th>field<th>type<th>{''.join(rows)}</table>" if rows else ""


def _kind(field: Fields) -> str:
    """A type in words, as HTML."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"<a href='#{html.escape(name)}'>{html.escape(_short(name))}</a>"
    if "anyOf" in field:
        return " or ".join(_kind(each) for each in field["anyOf"] if each.get("type") != "null") or "null"
    if "enum" in field:
        return " or ".join(f"<code>{html.escape(str(value))}</code>" for value in field["enum"] if value is not None)
    kind = field.get("type", "any")
    text = " or ".join(kind) if isinstance(kind, list) else kind
    if kind == "array":
        text = f"list of {_kind(field.get('items', {}))}"
    if kind == "object" and "properties" in field:
        text = "{" + ", ".join(html.escape(name) for name in field["properties"]) + "}"
    limits = {
        "minimum": "≥",
        "exclusiveMinimum": "&gt;",
        "maximum": "≤",
        "maxLength": "length ≤",
        "maxItems": "count ≤",
    }
    return ", ".join([text, *(f"{word} {field[name]}" for name, word in limits.items() if name in field)])


def _short(name: str) -> str:
    """Without the module, but for its last part."""
    return ".".join(name.split(".")[-2:])


def _prose(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


class Description:
    """The handlers."""

    def __init__(self) -> None:
        self._document = b""
        self._page = b""

    @property
    def routes(self) -> Routes:
        return (
            Operation("GET", "/openapi.json", self.document, "open", "This API as an OpenAPI document"),
            Operation("GET", "/docs", self.page, "open", "This API as a page", gives="text/html"),
        )

    def describe(self, groups: Groups) -> None:
        """Once, when all routes are known."""
        described = document(groups)
        self._document, self._page = msgspec.json.encode(described), page(described).encode()

    async def document(self, exchange: Exchange) -> None:
        await exchange.answer(200, self._document)

    async def page(self, exchange: Exchange) -> None:
        policy = b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
        await exchange.answer(200, self._page, b"text/html; charset=utf-8", ((b"content-security-policy", policy),))
