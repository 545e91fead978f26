"""The SDK's protobuf messages to arrays and back; the generated classes are the SDK's own, installed with ``rlframe[server]``.

`trainer.server.data` checks the contents of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from trainer.server.errors import UserError
from workers.engines.adapters import PromptScores
from workers.engines.protocol import Completion

_NUMPY = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


@dataclass
class Datum:
    """One datum as it arrived."""

    tokens: np.ndarray
    """int32[T]"""
    inputs: dict[str, np.ndarray]
    """``loss_fn_inputs`` by name, any shape."""


@dataclass
class PassRequest:
    """``forward_backward``, or ``forward`` when ``forward_only``."""

    model_id: str
    seq_id: int | None
    loss: str
    settings: dict[str, float]
    forward_only: bool
    data: list[Datum]
    fault: UserError | None = None
    """Why the data could not be decoded; the request keeps its place in the order of calls."""


def read_pass(body: bytes) -> PassRequest:
    """Decode the body of ``forward_backward``.

    Raises:
        UserError: it is not such a message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise UserError("The body of forward_backward is not the SDK's protobuf message; use tinker 0.25 or newer.") from None
    request = PassRequest(message.model_id, message.seq_id or None, message.loss_fn, {}, message.forward_only, [])
    try:
        request.settings = _settings(message)
        request.data = [_datum(d, datum) for d, datum in enumerate(message.data)]
    except UserError as error:
        request.fault = error
    return request


def _settings(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    texts = [name for name, value in message.loss_fn_config_v2.items() if value.WhichOneof("value") == "text"]
    if texts:
        raise UserError(f"loss_fn_config[{texts[0]!r}] is a text; the settings of losses are numbers.")
    return dict(message.loss_fn_config) | {name: value.number for name, value in message.loss_fn_config_v2.items()}


def _datum(d: int, message: pb.Datum) -> Datum:
    parts = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise UserError(f"Datum {d}: model_input has a chunk that is not text, which no model of this server takes.")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return Datum(tokens, {name: _array(d, name, tensor) for name, tensor in message.loss_fn_inputs.items()})


def _array(d: int, name: str, tensor: pb.Tensor) -> np.ndarray:
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"Datum {d}: loss_fn_inputs[{name!r}] has a dtype other than float32 and int64.")
    try:
        if tensor.HasField("sparse_csr"):
            csr = tensor.sparse_csr
            rows, columns = np.frombuffer(csr.crow_indices, np.int64), np.frombuffer(csr.col_indices, np.int64)
            return dense(np.frombuffer(csr.values, dtype), rows, columns, list(tensor.shape))
        flat = np.frombuffer(tensor.dense, dtype)
        return flat.reshape(tuple(tensor.shape)) if tensor.shape else flat
    except ValueError as error:
        raise UserError(f"Datum {d}: loss_fn_inputs[{name!r}] is not the tensor that it says: {error}.") from None


def dense(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int], fill: int = 0) -> np.ndarray:
    """A matrix from compressed sparse rows.

    Raises:
        ValueError: the parts do not fit together.
    """
    good = len(shape) == 2 and len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns)
    if not good or (np.diff(rows) < 0).any() or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise ValueError("its sparse rows do not fit together")
    full = np.full(shape, fill, values.dtype)
    full[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return full


def write_outputs(fields: Mapping[str, list[np.ndarray]], count: int, metrics: Mapping[str, float]) -> bytes:
    """``ForwardBackwardOutput``.

    Args:
        fields: name -> one float32 array per datum, [T] or [T, K].
        count: data.
        metrics: ``name:reduction`` to number.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    first = 0
    while first < count:
        # The arrays of one record share everything but their length.
        last = first + 1
        while last < count and all(arrays[last].shape[1:] == arrays[first].shape[1:] for arrays in fields.values()):
            last += 1
        record = message.loss_fn_outputs.add(num_datums=last - first)
        for name, arrays in fields.items():
            part = [np.ascontiguousarray(array, np.float32) for array in arrays[first:last]]
            batched = record.fields[name]
            batched.dtype = pb.DTYPE_FLOAT32
            batched.data = b"".join(array.tobytes() for array in part)
            batched.offsets = np.cumsum([0, *(array.nbytes for array in part)]).astype(np.int64).tobytes()
            batched.trailing_shape.extend(part[0].shape[1:])
        first = last
    for name, value in metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def write_samples(completions: list[Completion], top_k: int, prompt: PromptScores | None, prompt_top_k: int) -> bytes:
    """``SampleResponse``."""
    message = pb.SampleResponse()
    for completion in completions:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if completion.finish == "stop" else pb.STOP_REASON_LENGTH,
            tokens=completion.ids.astype(np.int32).tobytes(),
            logprobs=completion.logprobs.astype(np.float32).tobytes(),
        )
        if top_k:
            _write_top(sequence.topk_sampled_logprobs, completion.head_ids, completion.head_logprobs)
    if prompt is not None:
        message.prompt_logprobs = prompt.logprobs.astype(np.float32).tobytes()
        if prompt_top_k:
            _write_top(message.topk_prompt_logprobs, prompt.top_ids, prompt.top_logprobs)
        if prompt.target_logprobs is not None:
            _write_tensor(message.target_prompt_logprobs, prompt.target_logprobs, pb.DTYPE_FLOAT32, np.float32)
        if prompt.drawn_ids is not None and prompt.drawn_logprobs is not None:
            _write_tensor(message.prompt_alt_tokens.tokens, prompt.drawn_ids, pb.DTYPE_INT64, np.int64)
            _write_tensor(message.prompt_alt_tokens.logprobs, prompt.drawn_logprobs, pb.DTYPE_FLOAT32, np.float32)
    return message.SerializeToString()


def _write_top(message: pb.TopkLogprobs, ids: np.ndarray, logprobs: np.ndarray) -> None:
    message.length, message.k = ids.shape
    message.token_ids = ids.astype(np.int32).tobytes()
    message.logprobs = logprobs.astype(np.float32).tobytes()


def _write_tensor(message: pb.Tensor, array: np.ndarray, dtype: int, numpy_dtype: type) -> None:
    message.dtype = dtype  # type: ignore[assignment]
    message.shape.extend(array.shape)
    message.dense = array.astype(numpy_dtype).tobytes()
