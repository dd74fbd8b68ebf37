"""The Open Inference Protocol (KServe v2) over HTTP, with Triton's extensions.

GET  /v2, /v2/health/live, /v2/health/ready
GET  /v2/models/{m}[/versions/{v}], .../ready, .../config
POST /v2/models/{m}[/versions/{v}]/infer               named tensors, as JSON or binary
POST .../generate, .../generate_stream                 the same as plain JSON fields, whole or as server-sent events
POST /v2/repository/index                              the one model served

`inference` says what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tricorn import __version__
from tricorn.server.bodies import check_form, decode
from tricorn.server.errors import HttpError
from tricorn.server.exchange import EVENTS, Dialect, Exchange, event
from tricorn.server.inference import (
    ID_INPUTS,
    ID_OUTPUTS,
    TEXT_INPUTS,
    TEXT_OUTPUTS,
    VERSION,
    Inference,
    Port,
    read,
    timeout_of,
    values_of,
)
from tricorn.server.loading import answer_ready
from tricorn.server.routes import Operation, Routes
from tricorn.server.tensors import Tensor, fault, from_raw, from_values, to_raw

Fields = dict[str, Any]

EXTENSIONS = ["binary_tensor_data", "generate", "model_configuration", "model_repository"]

HEADER = b"inference-header-content-length"
"""How many bytes of a body are JSON; tensors as raw bytes follow."""


def error(error: HttpError) -> Fields:
    return {"error": error.message}


DIALECT = Dialect(error, EVENTS, event)

# --- what the server and the model are


def server_metadata() -> Fields:
    return {"name": "tricorn", "version": __version__, "extensions": EXTENSIONS}


def ports(name: str) -> tuple[Sequence[Port], Sequence[Port]]:
    """The inputs and outputs of a model of this name."""
    return (ID_INPUTS, ID_OUTPUTS) if name == "tensorrt_llm" else (TEXT_INPUTS, TEXT_OUTPUTS)


def model_metadata(name: str) -> Fields:
    inputs, outputs = (
        [{"name": port.name, "datatype": port.datatype, "shape": [-1, port.size]} for port in group]
        for group in ports(name)
    )
    return {"name": name, "versions": [VERSION], "platform": "tricorn", "inputs": inputs, "outputs": outputs}


def model_config(name: str) -> Fields:
    """As Triton describes models; a row is one sequence, and requests of one row are run together."""
    inputs, outputs = ports(name)
    return {
        "name": name,
        "platform": "tricorn",
        "backend": "tricorn",
        "max_batch_size": 1,
        "input": [{**_config(port), "optional": port.optional} for port in inputs],
        "output": [_config(port) for port in outputs],
        "model_transaction_policy": {"decoupled": True},
    }


def _config(port: Port) -> Fields:
    kind = "STRING" if port.datatype == "BYTES" else port.datatype
    return {"name": port.name, "data_type": f"TYPE_{kind}", "dims": [port.size]}


# --- requests and answers of named tensors


class Input(msgspec.Struct, frozen=True):
    """A tensor of a request; without `data` its bytes follow the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: Fields = {}


class Output(msgspec.Struct, frozen=True):
    """What a request wants back."""

    name: str
    parameters: Fields = {}


class Request(msgspec.Struct, frozen=True):
    """The JSON of a request."""

    inputs: list[Input]
    outputs: list[Output] = []
    parameters: Fields = {}
    id: str = ""


class Generate(msgspec.Struct, frozen=True):
    """What generate knows beside the inputs by name."""

    parameters: Fields = {}
    id: str = ""


_request = msgspec.json.Decoder(Request)
_generate = msgspec.json.Decoder(Generate)
_values = msgspec.json.Decoder(Fields)


def split(body: bytes, header: bytes | None) -> tuple[bytes, bytes]:
    """The JSON of a body, and what follows it. Raises HttpError 400."""
    if header is None:
        return body, b""
    length = int(header) if header.isdigit() and len(header) < 12 else -1
    if not 0 <= length <= len(body):
        name = HEADER.decode()
        raise HttpError(400, f"{name}: must be from 0 to the {len(body)} bytes of the body", name, "invalid_value")
    return body[:length], body[length:]


def tensors(request: Request, rest: bytes) -> list[Tensor]:
    """The inputs of a request. Raises HttpError 400 naming the one at fault."""
    found = []
    for each in request.inputs:
        size = each.parameters.get("binary_data_size")
        if size is None:
            if each.data is None:
                raise fault(each.name, "neither data nor binary_data_size")
            found.append(from_values(each.name, each.datatype, each.shape, each.data))
            continue
        if not isinstance(size, int) or not 0 <= size <= len(rest):
            raise fault(each.name, "binary_data_size is more than the body holds")
        found.append(from_raw(each.name, each.datatype, each.shape, rest[:size]))
        rest = rest[size:]
    if rest:
        raise HttpError(400, f"the body holds {len(rest)} bytes more than its tensors", code="invalid_value")
    return found


def chosen(outputs: list[Tensor], wanted: Sequence[str]) -> list[Tensor]:
    """The outputs that a request wants; without a word, all."""
    known = {tensor.name: tensor for tensor in outputs}
    for name in wanted:
        if name not in known:
            raise fault(name, f"no such output; there are {', '.join(known)}")
    return [known[name] for name in wanted] if wanted else outputs


class Kserve:
    """The handlers."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._work = inference.work

    @property
    def routes(self) -> Routes:
        models = (
            Operation("GET", "/ready", self.model_ready, "key", "Whether the model would be run at once"),
            Operation("GET", "/config", self.config, "key", "The model's configuration"),
            Operation("POST", "/infer", self.infer, "key", "Run the model on named tensors", (Request,)),
            Operation("POST", "/generate", self.generate, "key", "Run it on plain fields", (Generate,)),
            Operation("POST", "/generate_stream", self.generate_stream, "key", "The same, streamed", (Generate,)),
            Operation("GET", "", self.model, "key", "The model's tensors"),  # last, as a name may hold slashes
        )
        return (
            Operation("GET", "/v2", self.server, "key", "What the server is"),
            Operation("GET", "/v2/health/live", self.live, "open", "Whether the engine lives"),
            Operation("GET", "/v2/health/ready", self.ready, "open", "Whether a request would be served at once"),
            Operation("POST", "/v2/repository/index", self.index, "key", "The models: one"),
            *(
                replace(model, path=f"/v2/models/{{model:path}}{version}{model.path}")
                for version in ("/versions/{version}", "")
                for model in models
            ),
        )

    def _model(self, exchange: Exchange) -> str:
        """The name in the path. Raises HttpError 404."""
        name = exchange.path_parameter("model") or ""
        self._inference.check_model(name, exchange.path_parameter("version") or "")
        return name

    async def server(self, exchange: Exchange) -> None:
        await exchange.answer_json(server_metadata())

    async def live(self, exchange: Exchange) -> None:
        if self._work.status == "dead":
            raise HttpError(503, "the engine is not running", code="engine_unavailable")
        await exchange.answer_json({"live": True})

    async def ready(self, exchange: Exchange) -> None:
        await answer_ready(exchange, self._work.status)

    async def index(self, exchange: Exchange) -> None:
        await exchange.body()  # there is one model to choose from
        state = "READY" if self._work.status == "ready" else "UNAVAILABLE"
        await exchange.answer_json([{"name": self._work.name, "version": VERSION, "state": state}])

    async def model(self, exchange: Exchange) -> None:
        await exchange.answer_json(model_metadata(self._model(exchange)))

    async def model_ready(self, exchange: Exchange) -> None:
        self._model(exchange)
        await answer_ready(exchange, self._work.status)

    async def config(self, exchange: Exchange) -> None:
        await exchange.answer_json(model_config(self._model(exchange)))

    async def infer(self, exchange: Exchange) -> None:
        body = await exchange.body(binary=True)
        self._work.open()
        name = self._model(exchange)
        head, rest = split(body, exchange.header(HEADER))
        check_form(head, {})
        request = decode(_request, head)
        asked = read(values_of(tensors(request, rest)))

        async def respond(outputs: list[Tensor], final: bool) -> None:
            await self._answer(exchange, name, request, outputs)

        await self._inference.infer(exchange, asked, timeout_of(request.parameters), respond, stream=False)

    async def _answer(self, exchange: Exchange, name: str, request: Request, outputs: list[Tensor]) -> None:
        everywhere = request.parameters.get("binary_data_output") is True
        binary = {each.name: each.parameters.get("binary_data", everywhere) for each in request.outputs}
        parts: list[bytes] = []
        fields = []
        for tensor in chosen(outputs, list(binary)):
            field: Fields = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            if binary.get(tensor.name, everywhere):
                parts.append(to_raw(tensor))
                field["parameters"] = {"binary_data_size": len(parts[-1])}
            else:
                field["data"] = tensor.values
            fields.append(field)
        named = {"id": request.id} if request.id else {}
        answer = {"model_name": name, "model_version": VERSION, **named, "outputs": fields}
        if not parts:
            await exchange.answer_json(answer)
            return
        head = msgspec.json.encode(answer)
        length = ((HEADER, b"%d" % len(head)),)
        await exchange.answer(200, b"".join((head, *parts)), b"application/octet-stream", length)

    async def generate(self, exchange: Exchange) -> None:
        await self._generate(exchange, stream=False)

    async def generate_stream(self, exchange: Exchange) -> None:
        await self._generate(exchange, stream=True)

    async def _generate(self, exchange: Exchange, *, stream: bool) -> None:
        body = await exchange.body()
        self._work.open()
        name = self._model(exchange)
        check_form(body, {})
        given, known = decode(_values, body), decode(_generate, body)
        inputs = {key: value for key, value in given.items() if key not in ("id", "parameters")}
        parameters = {key: value for key, value in known.parameters.items() if key in ("timeout", "sequence_id")}
        others = {key: value for key, value in known.parameters.items() if key not in parameters}
        head = {**({"id": known.id} if known.id else {}), "model_name": name, "model_version": VERSION}

        async def respond(outputs: list[Tensor], final: bool) -> None:
            answer = {**head, **{tensor.name: _plain(tensor) for tensor in outputs}}
            await (exchange.events(answer) if stream else exchange.answer_json(answer))

        asked = read({**others, **inputs})
        await self._inference.infer(exchange, asked, timeout_of(parameters), respond, stream=stream)
        if stream:
            await exchange.end_events(b"")


def _plain(tensor: Tensor) -> Any:
    """A list, or the one element there is of a tensor that holds no list."""
    return tensor.values[0] if tensor.shape == (1, 1) else tensor.values
