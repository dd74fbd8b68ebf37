"""The messages of `inference.GRPCInferenceService`, as far as it is served: names and numbers of fields as the Open
Inference Protocol and Triton publish them.

They live in a pool of their own, so that a client's generated code for the same names may live in the same process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

Fields = dict[str, tuple[int, str]]

_MODEL: Fields = {"name": (1, "string"), "version": (2, "string")}
_TENSOR: Fields = {
    "name": (1, "string"),
    "datatype": (2, "string"),
    "shape": (3, "int64*"),
    "parameters": (4, "InferParameter%"),
    "contents": (5, "InferTensorContents"),
}

MESSAGES: dict[str, Fields] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": (1, "string"), "version": (2, "string"), "extensions": (3, "string*")},
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "string*"),
        "platform": (3, "string"),
        "inputs": (4, "TensorMetadata*"),
        "outputs": (5, "TensorMetadata*"),
    },
    "TensorMetadata": {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "int64*")},
    "ModelConfigRequest": _MODEL,
    "ModelConfigResponse": {"config": (1, "ModelConfig")},
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "ModelInput*"),
        "output": (6, "ModelOutput*"),
        "backend": (17, "string"),
        "model_transaction_policy": (19, "ModelTransactionPolicy"),
    },
    "ModelInput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (4, "int64*"), "optional": (8, "bool")},
    "ModelOutput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (3, "int64*")},
    "ModelTransactionPolicy": {"decoupled": (1, "bool")},
    "RepositoryIndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "RepositoryIndexResponse": {"models": (1, "ModelIndex*")},
    "ModelIndex": {"name": (1, "string"), "version": (2, "string"), "state": (3, "string"), "reason": (4, "string")},
    "InferParameter": {
        "bool_param": (1, "bool|"),
        "int64_param": (2, "int64|"),
        "string_param": (3, "string|"),
        "double_param": (4, "double|"),
        "uint64_param": (5, "uint64|"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "bool*"),
        "int_contents": (2, "int32*"),
        "int64_contents": (3, "int64*"),
        "uint_contents": (4, "uint32*"),
        "uint64_contents": (5, "uint64*"),
        "fp32_contents": (6, "float*"),
        "fp64_contents": (7, "double*"),
        "bytes_contents": (8, "bytes*"),
    },
    "InferInputTensor": _TENSOR,
    "InferOutputTensor": _TENSOR,
    "InferRequestedOutputTensor": {"name": (1, "string"), "parameters": (2, "InferParameter%")},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "InferParameter%"),
        "inputs": (5, "InferInputTensor*"),
        "outputs": (6, "InferRequestedOutputTensor*"),
        "raw_input_contents": (7, "bytes*"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "InferParameter%"),
        "outputs": (5, "InferOutputTensor*"),
        "raw_output_contents": (6, "bytes*"),
    },
    "ModelStreamInferResponse": {"error_message": (1, "string"), "infer_response": (2, "ModelInferResponse")},
}
"""Number and type of each field: `*` repeats it, `%` maps strings to it, `|` makes it one of the message's choice."""

DATA_TYPES = {"BOOL": 1, "UINT64": 5, "INT32": 8, "FP32": 11, "STRING": 13}
"""Numbers of the types that the inputs and outputs of a model have here."""

_Field = descriptor_pb2.FieldDescriptorProto


def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="tricorn/inference.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add(message: Any, name: str, number: int, kind: str) -> None:
    base = kind.rstrip("*%|")
    label = _Field.LABEL_OPTIONAL if kind in (base, f"{base}|") else _Field.LABEL_REPEATED
    field = message.field.add(name=name, number=number, label=label)
    if kind.endswith("%"):
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add(entry, "key", 1, "string")
        _add(entry, "value", 2, base)
        base = f"{message.name}.{entry.name}"
    if kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if base in MESSAGES or "." in base:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{base}"
    else:
        field.type = getattr(_Field, f"TYPE_{base.upper()}")


_POOL = _pool()

CLASSES: dict[str, Any] = {
    name: message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES
}
"""The class of each message."""
