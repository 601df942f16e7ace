"""The format of a saved session: a safetensors file with tokens, sampling state and K/V by layer.

    __metadata__            format, version, model, model_digest, manifest, kernel, kv_dtype, num_prompt,
                            choice, params (JSON)
    tokens                  I64 [tokens]
    layers.N.k, layers.N.v  F32 [positions, kv_heads, head_dim], of all layers or of none
    sha256                  U8 [32]: over every byte of the file before it, and the last of it

Positions are those of whole blocks; the tokens after them run again. No part of a file is trusted before all
of it was read once and its SHA-256 is right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from convoy.engine.sessions.file import SessionReader
from convoy.errors import RequestError, SessionError
from convoy.model.sampling.params import SamplingParams
from convoy.wire.text import plain_text

# The amount so far, and in all.
Progress = Callable[[int, int], None]
# K or V of one layer: [positions, kv_heads, head_dim].
Half = npt.NDArray[np.float32]

# Version 1 named no manifest.
_FORMAT, _VERSION = "convoy-session", "2"
_MAX_VERSION = 16
_MAX_HEADER_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_DIGEST_BYTES = 32
_SIZES = {"I64": 8, "F32": 4, "U8": 1}


@dataclass(frozen=True, slots=True)
class SessionModel:
    """Hold the model facts that a session needs.

    ``keeps_kv`` tells whether its K/V may be saved at all. ``manifest`` is the digest that also covers the
    weights' values; it is empty if they were not hashed. ``kv_dtype`` is the dtype of K/V on the stages. A
    file has their values as float32, and only stages with the same kernel and dtype take them.
    """

    name: str
    digest: str
    kernel: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    keeps_kv: bool
    manifest: str = ""
    kv_dtype: str = "f32"

    @property
    def position_bytes(self) -> int:
        """Return the bytes of K/V of one position in one layer."""
        return 2 * 4 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class SavedState:
    """Hold all of a session but its K/V. The file has K/V for the first ``positions`` tokens."""

    tokens: tuple[int, ...]
    num_prompt: int
    choice: int
    params: SamplingParams
    positions: int


def encode_start(model: SessionModel, state: SavedState) -> bytes:
    """Return the header and the tokens, which stand before the K/V."""
    half = (state.positions, model.num_kv_heads, model.head_dim)
    shapes: list[tuple[str, str, tuple[int, ...]]] = [("tokens", "I64", (len(state.tokens),))]
    if state.positions:
        shapes += [(name, "F32", half) for name in _layer_names(model)]
    shapes.append(("sha256", "U8", (_DIGEST_BYTES,)))
    header: dict[str, Any] = {"__metadata__": _metadata(model, state)}
    end = 0
    for name, dtype, shape in shapes:
        start, end = end, end + _num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + np.array(state.tokens, dtype="<i8").tobytes()


class SavedSession:
    """Read a file that was checked to be whole and right.

    Raises SessionError for any other, with the reason.
    """

    def __init__(self, reader: SessionReader, model: SessionModel, progress: Progress) -> None:
        self._reader = reader
        self._model = model
        self._base, self._header = self._read_header()
        self._offsets: dict[str, int] = {}
        self._check_places()
        _check_digest(reader, progress)
        self.state = self._read_state()
        same_dtype = self._metadata.get("kv_dtype") == model.kv_dtype
        self.same_kv = same_dtype and self._metadata["kernel"] == model.kernel

    def read(self, layer: int, start: int, end: int) -> tuple[Half, Half]:
        """Return K and V of positions [start, end) in one layer."""
        row = self._model.position_bytes // 2
        halves = []
        for name in (f"layers.{layer}.k", f"layers.{layer}.v"):
            data = self._reader.read(self._base + self._offsets[name] + start * row, (end - start) * row)
            half = np.frombuffer(data, dtype="<f4").reshape(
                -1, self._model.num_kv_heads, self._model.head_dim
            )
            if not np.isfinite(half).all():
                _refuse(f"{name} has a number that is not finite")
            halves.append(half)
        return halves[0], halves[1]

    def _read_header(self) -> tuple[int, dict[str, dict[str, Any]]]:
        size = self._reader.size
        length = int.from_bytes(self._reader.read(0, 8), "little") if size >= 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            _refuse(f"it has {size} bytes and a header of {length}")
        try:
            header = json.loads(self._reader.read(8, length))
        except (ValueError, RecursionError):
            _refuse("its header is not JSON")
        metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
            _refuse("its header names no session")
        if metadata.get("version") != _VERSION:
            found = metadata.get("version")
            named = plain_text(found, _MAX_VERSION) if isinstance(found, str) else "(none)"
            _refuse(f"it has version {named} of the format, expected {_VERSION}")
        if metadata.get("model_digest") != self._model.digest:
            raise SessionError(
                f"the session is of another model: expected the digest {self._model.digest[:12]} of "
                f"{self._model.name}",
                hint="load it with the model that it was saved with",
            )
        if metadata.get("manifest") != self._model.manifest:
            raise SessionError(
                f"the session is of other weights: expected the manifest {self._model.manifest[:12]} of "
                f"{self._model.name}",
                hint="load it with the very files that it was saved with",
            )
        if not isinstance(metadata.get("kernel"), str):
            _refuse("its header names no kernel")
        self._metadata = metadata
        return 8 + length, header

    def _check_places(self) -> None:
        """Check that exactly the expected tensors are there, in the right shapes, without gaps to the end."""
        ends = {}
        for name, entry in self._header.items():
            start, end = self._place(name, entry)
            self._offsets[name] = start
            ends[start] = end
        layers = set(_layer_names(self._model))
        found = set(self._offsets)
        if found not in ({"tokens", "sha256"}, {"tokens", "sha256"} | layers):
            missing = sorted(({"tokens", "sha256"} | layers) - found) or ["nothing"]
            _refuse(f"its tensors are not those of {self._model.name}: {missing[0]} is missing")
        at = 0
        while at in ends and ends[at] > at:
            at = ends.pop(at)
        if any(end != start for start, end in ends.items()) or self._base + at != self._reader.size:
            _refuse(f"its tensors do not fill its {self._reader.size} bytes")
        if self._offsets["sha256"] + _DIGEST_BYTES != at:
            _refuse("its digest does not stand at its end")

    def _place(self, name: str, entry: object) -> tuple[int, int]:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            _refuse("a tensor of it has no dtype, shape or place")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not _is_numbers(shape) or not _is_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            _refuse("a tensor of it has no shape or place")
        self._check_shape(name, dtype, tuple(shape))
        if offsets[1] - offsets[0] != _num_bytes(dtype, tuple(shape)):
            _refuse("a tensor of it has another size than its shape")
        return offsets[0], offsets[1]

    def _check_shape(self, name: str, dtype: object, shape: tuple[int, ...]) -> None:
        if name == "tokens":
            expected, wanted = "I64", len(shape) == 1 and shape[0] <= self._model.max_context
        elif name == "sha256":
            expected, wanted = "U8", shape == (_DIGEST_BYTES,)
        else:
            model = self._model
            known = len(shape) == 3 and 0 < shape[0] <= self._model.max_context
            expected, wanted = "F32", known and shape[1:] == (model.num_kv_heads, model.head_dim)
        if dtype != expected or not wanted:
            _refuse("a tensor of it has another dtype or shape than the model has, or more than its context")

    def _read_state(self) -> SavedState:
        shape = self._header["tokens"]["shape"]
        data = self._reader.read(self._base + self._offsets["tokens"], 8 * shape[0])
        tokens = np.frombuffer(data, dtype="<i8")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._model.vocab_size:
            _refuse(f"it has a token outside the vocabulary of {self._model.vocab_size}")
        lengths = {self._header[name]["shape"][0] for name in self._offsets if name.startswith("layers.")}
        positions = max(lengths, default=0)
        if len(lengths) > 1 or positions > len(tokens):
            _refuse(f"it has K/V of {positions} positions, and {len(tokens)} tokens")
        try:
            num_prompt, choice = (int(self._metadata[name]) for name in ("num_prompt", "choice"))
            params = _read_params(self._metadata["params"])
            if not 0 <= num_prompt <= len(tokens) or not 0 <= choice < 2**31:
                _refuse("its sampling state makes no sense")
            params.check_vocabulary(self._model.vocab_size)
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError, RequestError):
            _refuse("its sampling state makes no sense")
        return SavedState(tuple(tokens.tolist()), num_prompt, choice, params, positions)


def _metadata(model: SessionModel, state: SavedState) -> dict[str, str]:
    params = {field.name: getattr(state.params, field.name) for field in fields(SamplingParams)}
    params["logit_bias"] = list(state.params.logit_bias.items())
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "model": model.name,
        "model_digest": model.digest,
        "manifest": model.manifest,
        "kernel": model.kernel,
        "kv_dtype": model.kv_dtype,
        "num_prompt": str(state.num_prompt),
        "choice": str(state.choice),
        "params": json.dumps(params),
    }


def _read_params(text: str) -> SamplingParams:
    values = json.loads(text)
    if set(values) != {field.name for field in fields(SamplingParams)}:
        raise ValueError("other parameters than are known")
    values["logit_bias"] = dict(values["logit_bias"])
    return SamplingParams(**values)


def _check_digest(reader: SessionReader, progress: Progress) -> None:
    digest, end = hashlib.sha256(), reader.size - _DIGEST_BYTES
    for start in range(0, end, _READ_BYTES):
        digest.update(reader.read(start, min(_READ_BYTES, end - start)))
        progress(start, reader.size)
    if reader.read(end, _DIGEST_BYTES) != digest.digest():
        _refuse("its contents were changed after the write: its digest differs")


def _layer_names(model: SessionModel) -> Sequence[str]:
    return [f"layers.{layer}.{half}" for layer in range(model.num_layers) for half in "kv"]


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**48 for one in value)


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = _SIZES[dtype]
    for one in shape:
        size *= one
    return size


def _refuse(why: str) -> NoReturn:
    raise SessionError(
        f"this is no session that can be loaded: {why}",
        hint="name a file that `convoy session --save` or `Session.save` wrote",
    )
