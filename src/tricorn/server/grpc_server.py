"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`, as Triton serves it.

A call meets what an HTTP request meets: the same gate, deadlines, journal and metrics, with its metadata as headers.
Errors are statuses; in a stream, where many requests share one call, they are messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio

from tricorn.request import TricornError
from tricorn.server.errors import HttpError
from tricorn.server.exchange import MAX_BODY, Exchange, http_error
from tricorn.server.grpc_messages import CLASSES, DATA_TYPES, SERVICE
from tricorn.server.guard import Guard
from tricorn.server.inference import VERSION, Inference, Respond, read, timeout_of, values_of
from tricorn.server.journal import Journal
from tricorn.server.kserve import chosen, model_config, model_metadata, server_metadata
from tricorn.server.tensors import Tensor, fault, from_raw, from_values, to_raw

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

UNREAD = 64
"""Responses of one stream that may wait for its client."""

STOP_SECONDS = 1.0
"""How long calls may go on when the server stops; their generations have ended by then."""

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a port that another server has is taken
)

OPEN = frozenset({"ServerLive", "ServerReady"})
"""Methods that need no key."""

COUNTED = frozenset({"ModelInfer", "ModelStreamInfer"})
"""Those that count against the rate of a key."""

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Where a tensor of each type has its elements; the others come as raw bytes only."""


def parameters_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The value that each parameter holds."""
    choices = {name: value.WhichOneof("parameter_choice") for name, value in given.items()}
    return {name: getattr(given[name], choice) for name, choice in choices.items() if choice is not None}


def tensors_of(request: Any) -> list[Tensor]:
    """The inputs of a request. Raises HttpError 400 naming the one at fault."""
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        what = f"{len(raws)} raw contents for {len(request.inputs)} inputs"
        raise HttpError(400, f"raw_input_contents: {what}", "raw_input_contents", "invalid_value")
    if raws:
        return [
            from_raw(each.name, each.datatype, each.shape, raw) for each, raw in zip(request.inputs, raws, strict=True)
        ]
    return [from_values(each.name, each.datatype, each.shape, _contents(each)) for each in request.inputs]


def _contents(tensor: Any) -> list[Any]:
    name = _CONTENTS.get(tensor.datatype)
    if name is None:
        raise fault(tensor.name, f"{tensor.datatype[:40]} is not a datatype that contents can hold")
    return list(getattr(tensor.contents, name))


def response_of(request: Any, outputs: list[Tensor]) -> Any:
    """The outputs that the request wants, as raw bytes."""
    wanted = chosen(outputs, [output.name for output in request.outputs])
    return CLASSES["ModelInferResponse"](
        model_name=request.model_name,
        model_version=VERSION,
        id=request.id,
        outputs=[{"name": each.name, "datatype": each.datatype, "shape": each.shape} for each in wanted],
        raw_output_contents=[to_raw(each) for each in wanted],
    )


class Service:
    """The methods. `note_error` hears of each refusal; `guard` lets callers in by their metadata."""

    def __init__(
        self,
        inference: Inference,
        journal: Journal,
        note_error: Callable[[HttpError], None],
        guard: Guard,
    ) -> None:
        self._inference = inference
        self._work = inference.work
        self._journal = journal
        self._note_error = note_error
        self._guard = guard

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server calls."""
        single = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "RepositoryIndex": self._repository_index,
            "ModelInfer": self._model_infer,
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                partial(self._call, name, handle),
                CLASSES[f"{name}Request"].FromString,
                CLASSES[f"{name}Response"].SerializeToString,
            )
            for name, handle in single.items()
        }
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._model_stream_infer,
            CLASSES["ModelInferRequest"].FromString,
            CLASSES["ModelStreamInferResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    # --- calls

    async def _call(
        self, name: str, handle: Callable[[Exchange, Any], Awaitable[Any]], request: Any, context: Any
    ) -> Any:
        exchange = _exchange(name, context)
        try:
            answer = await self._follow(exchange, handle, request)
        except HttpError as error:
            code = CODES.get(error.status, grpc.StatusCode.INTERNAL)
            await context.abort(code, error.message, _trailing(exchange, error.headers))
        context.set_trailing_metadata(_trailing(exchange))
        return answer

    async def _follow(self, exchange: Exchange, handle: Callable[[Exchange, Any], Awaitable[Any]], request: Any) -> Any:
        """One request in the journal from its start to its end. Raises HttpError."""
        with self._journal.follow(exchange.entry):
            try:
                name = exchange.entry.route.rpartition("/")[2]
                self._guard.admit(exchange, "open" if name in OPEN else "key", counted=name in COUNTED)
                answer = await handle(exchange, request)
            except Exception as error:
                failure = http_error(error)
                exchange.entry.status, exchange.entry.error = failure.status, failure.code or "error"
                self._note_error(failure)
                raise failure from None
            exchange.entry.status = 200
            return answer

    async def _server_live(self, exchange: Exchange, request: Any) -> Any:
        return CLASSES["ServerLiveResponse"](live=self._work.status != "dead")

    async def _server_ready(self, exchange: Exchange, request: Any) -> Any:
        return CLASSES["ServerReadyResponse"](ready=self._work.status == "ready")

    async def _server_metadata(self, exchange: Exchange, request: Any) -> Any:
        return CLASSES["ServerMetadataResponse"](**server_metadata())

    async def _model_ready(self, exchange: Exchange, request: Any) -> Any:
        self._inference.check_model(request.name, request.version)
        return CLASSES["ModelReadyResponse"](ready=self._work.status == "ready")

    async def _model_metadata(self, exchange: Exchange, request: Any) -> Any:
        self._inference.check_model(request.name, request.version)
        return CLASSES["ModelMetadataResponse"](**model_metadata(request.name))

    async def _model_config(self, exchange: Exchange, request: Any) -> Any:
        self._inference.check_model(request.name, request.version)
        config = model_config(request.name)
        for port in (*config["input"], *config["output"]):
            port["data_type"] = DATA_TYPES[port["data_type"].removeprefix("TYPE_")]
        return CLASSES["ModelConfigResponse"](config=config)

    async def _repository_index(self, exchange: Exchange, request: Any) -> Any:
        state = "READY" if self._work.status == "ready" else "UNAVAILABLE"
        models = [{"name": self._work.name, "version": VERSION, "state": state}]
        return CLASSES["RepositoryIndexResponse"](models=models)

    async def _model_infer(self, exchange: Exchange, request: Any) -> Any:
        responses: list[Any] = []

        async def respond(outputs: list[Tensor], final: bool) -> None:
            responses.append(response_of(request, outputs))

        await self._infer(exchange, request, respond, stream=False)
        return responses[0]

    async def _infer(
        self,
        exchange: Exchange,
        request: Any,
        respond: Respond,
        *,
        stream: bool,
    ) -> None:
        self._work.open()
        self._inference.check_model(request.model_name, request.model_version)
        timeout = timeout_of(parameters_of(request.parameters))
        asked = read(values_of(tensors_of(request)))
        await self._inference.infer(exchange, asked, timeout, respond, stream=stream)

    # --- streams

    async def _model_stream_infer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Responses of all requests of a call, as they come; each request ends with one that says that it is final,
        or with an error.
        """
        queue: asyncio.Queue[Any] = asyncio.Queue(UNREAD)
        reading = asyncio.create_task(self._read(requests, context, queue))
        try:
            while (response := await queue.get()) is not None:
                yield response
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Any], context: Any, queue: asyncio.Queue[Any]) -> None:
        """Starts requests as they come; the last thing in the queue is None."""
        running: set[asyncio.Task[None]] = set()
        try:
            async for request in requests:
                task = asyncio.create_task(self._stream(_exchange("ModelStreamInfer", context), request, queue))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)
            await queue.put(None)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _stream(self, exchange: Exchange, request: Any, queue: asyncio.Queue[Any]) -> None:
        """One request of a stream."""

        async def handle(exchange: Exchange, request: Any) -> None:
            await self._infer(exchange, request, respond, stream=True)

        async def respond(outputs: list[Tensor], final: bool) -> None:
            response = response_of(request, outputs)
            response.parameters["triton_final_response"].bool_param = final
            await queue.put(CLASSES["ModelStreamInferResponse"](infer_response=response))

        try:
            await self._follow(exchange, handle, request)
        except HttpError as error:
            named = CLASSES["ModelInferResponse"](id=request.id, model_name=request.model_name)
            await queue.put(
                CLASSES["ModelStreamInferResponse"](error_message=error.message or "error", infer_response=named)
            )


def _exchange(method: str, context: Any) -> Exchange:
    """A call as the rest of the server knows requests. That its client has gone ends the call from outside."""
    headers = [
        (key.encode(), value if isinstance(value, bytes) else value.encode())
        for key, value in context.invocation_metadata()
    ]
    scope = {"type": "grpc", "path": f"/{SERVICE}/{method}", "headers": headers}
    return Exchange(scope, asyncio.Event().wait, _never, route=f"/{SERVICE}/{method}")  # type: ignore[arg-type]


async def _never(message: Any) -> NoReturn:
    raise AssertionError("a call is not answered over HTTP")


def _trailing(exchange: Exchange, headers: tuple[tuple[bytes, bytes], ...] = ()) -> tuple[tuple[str, str], ...]:
    """What an answer over HTTP would have in its headers."""
    fields = ((b"x-request-id", exchange.entry.id.encode()), *exchange.extra, *headers)
    return tuple((name.decode(), value.decode()) for name, value in fields if name != b"connection")


@dataclass(frozen=True)
class Listener:
    """A gRPC server and its port."""

    server: grpc.aio.Server
    port: int

    async def stop(self) -> None:
        await self.server.stop(STOP_SECONDS)


async def listen(service: Service, host: str, port: int, tls: tuple[Path, Path] | None = None) -> Listener:
    """Serves, over TLS with a key and a certificate. Raises TricornError when the port is taken."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((service.handler(),))
    try:
        if tls is None:
            bound = server.add_insecure_port(f"{host}:{port}")
        else:
            pair = tls[0].read_bytes(), tls[1].read_bytes()
            bound = server.add_secure_port(f"{host}:{port}", grpc.ssl_server_credentials([pair]))
    except RuntimeError:
        bound = 0
    if not bound:
        raise TricornError(f"cannot listen on {host}:{port} for gRPC: choose another --grpc-port")
    await server.start()
    return Listener(server, bound)
