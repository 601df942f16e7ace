"""Convert between torch tensors and their form on the wire."""

from __future__ import annotations

import sys

import numpy as np
import torch

from convoy.errors import HiddenError, StepError
from convoy.wire.messages.control import Step
from convoy.wire.tensor import WireTensor

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# dtypes in which a stage takes hidden states
HIDDEN_DTYPES = frozenset({torch.float32, torch.bfloat16})
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def to_wire(tensor: torch.Tensor, dtype: str | None = None) -> WireTensor:
    """Describe a tensor for the wire, converted to ``dtype`` if given; it is copied only where needed.

    Raises StepError on a big-endian machine; torch runs on none here.
    """
    if sys.byteorder != "little":
        raise StepError("activations are sent little-endian, but this machine is not")
    if dtype is not None:
        tensor = tensor.to(_DTYPES[dtype])
    tensor = tensor.detach().to("cpu").contiguous()
    data = memoryview(tensor.view(torch.uint8).numpy().data).cast("B") if tensor.numel() else memoryview(b"")
    return WireTensor(_NAMES[tensor.dtype], tuple(tensor.shape), data)


def from_wire(tensor: WireTensor, *, hidden_size: int, dtype: str) -> torch.Tensor:
    """Return a received hidden state [T, hidden_size] in ``dtype``, sharing the received memory if possible.

    Raises StepError if the dtype, rank, width or byte count is not the expected one.
    """
    if tensor.dtype != dtype:
        raise StepError(f"a hidden state came as {tensor.dtype}, expected {dtype}")
    if len(tensor.shape) != 2 or tensor.shape[1] != hidden_size or tensor.shape[0] < 0:
        raise StepError(f"a hidden state came with shape {tensor.shape}, expected [tokens, {hidden_size}]")
    torch_dtype = _DTYPES[dtype]
    data = memoryview(tensor.data)
    expected = tensor.shape[0] * hidden_size * torch_dtype.itemsize
    if data.nbytes != expected:
        raise StepError(f"a hidden state came with {data.nbytes} bytes, expected {expected}")
    if not expected:
        return torch.empty(tensor.shape[0], hidden_size, dtype=torch_dtype)
    # torch warns about read-only memory, so such bytes are copied once
    array = np.frombuffer(data, dtype=np.uint8)
    flat = torch.from_numpy(array if not data.readonly else array.copy()).view(torch_dtype)
    return flat.view(tensor.shape[0], hidden_size)


def tokens_from_bytes(data: bytes) -> torch.Tensor:
    """Return a step's token ids, int64 [T], from little-endian uint32. Raises StepError."""
    if len(data) % 4:
        raise StepError(f"token ids came as {len(data)} bytes, expected a multiple of 4")
    return torch.from_numpy(np.frombuffer(data, dtype="<u4").astype(np.int64))


def take_hidden(hidden: torch.Tensor | None, num_tokens: int, hidden_size: int) -> torch.Tensor:
    """Return a hidden state as float32 [num_tokens, hidden_size]. Raises HiddenError."""
    return check_hidden(hidden, num_tokens, hidden_size).float()


def check_hidden(hidden: torch.Tensor | None, num_tokens: int, hidden_size: int) -> torch.Tensor:
    """Return ``hidden`` if it is a hidden state [num_tokens, hidden_size]. Raises HiddenError if not."""
    wanted = (num_tokens, hidden_size)
    if hidden is None or hidden.shape != wanted or hidden.dtype not in HIDDEN_DTYPES:
        found = "nothing" if hidden is None else f"{hidden.dtype} of shape {list(hidden.shape)}"
        raise HiddenError(f"expected a float32 or bfloat16 hidden state of {list(wanted)}, got {found}")
    return hidden


def check_tokens(tokens: torch.Tensor | None, num_tokens: int, vocab_size: int) -> None:
    """Raise StepError unless there are exactly ``num_tokens`` ids, all of them in the vocabulary."""
    if tokens is None or tokens.shape != (num_tokens,):
        found = "no tokens" if tokens is None else f"tokens of shape {list(tokens.shape)}"
        raise StepError(f"a step of {num_tokens} tokens came with {found}")
    if num_tokens and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise StepError(f"a step has a token outside the vocabulary of {vocab_size}")


def select_rows(step: Step, hidden: torch.Tensor) -> torch.Tensor:
    """Return the trailing ``num_outputs`` rows of each row of a step, from the whole step's hidden state."""
    wanted = output_rows(step, hidden.shape[0])
    return hidden if wanted is None else hidden.index_select(0, wanted)


def output_rows(step: Step, num_rows: int) -> torch.Tensor | None:
    """Return which of ``num_rows`` rows of a hidden state go to the output, int64; None means all.

    Raises StepError for a hidden state of another step.
    """
    wanted: list[int] = []
    end = 0
    for row in step.rows:
        end += row.num_tokens
        wanted.extend(range(end - row.num_outputs, end))
    if num_rows != end:
        raise StepError(f"a step of {end} tokens has a hidden state of {num_rows} rows")
    return None if len(wanted) == end else torch.tensor(wanted, dtype=torch.int64)
