"""Read GGUF, llama.cpp's single file with settings, tokeniser and weights, as the library's model.

Names and settings are translated for the architectures below. llama.cpp rotates neighbouring elements, while
the library rotates halves, so the rows of Llama's q and k are stored in another order. The `gguf` package
unpacks the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.config.kernels import KEPT_FORMS
from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.gguf_header import TYPES, GgufHeader, read_gguf
from convoy.model.checkpoints.formats.unpacking import Index, Parts, StoredLayout, Unpacking
from convoy.plan.spec.config import is_above_0
from convoy.plan.spec.registry import FAMILIES

if TYPE_CHECKING:
    import torch

    from convoy.model.kernels.stored.weights import Stored

_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# the library uses the same names
ARCHITECTURES = tuple(sorted(name for name, family in FAMILIES.items() if family.gguf))
_LAYER = re.compile(r"blk\.([0-9]{1,6})\.([a-z_]+)\.(weight|bias)", re.ASCII)
_FACTORS = "rope_freqs.weight"
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PLAIN = frozenset(_TORCH_NAMES)
# the RoPE scaling of Llama 3.1 to 3.3; a file holds only the factors computed from it
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class GgufRows(Unpacking):
    """Unpack ``stored``, bytes [rows, bytes of a row].

    With ``turned_heads`` heads, the rows of each head's halves are interleaved, and are sorted here.
    """

    # ggml's number of the quantised type
    kind: int
    turned_heads: int | None = None

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield rows; whole heads at a time if their rows are reordered."""
        import torch

        package = gguf_package()
        num_rows, width = self.shape
        head_rows = num_rows // self.turned_heads if self.turned_heads else 1
        for rows in self.row_slices(num_rows, width, head_rows):
            packed = parts["stored"][rows].cpu().numpy()
            found = package.quants.dequantize(packed, package.GGMLQuantizationType(self.kind))
            values = torch.from_numpy(found)
            if self.turned_heads:
                values = values.view(-1, head_rows // 2, 2, width).transpose(1, 2).reshape(-1, width)
            yield (rows,), values

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of the rows, for types that are kept."""
        return self.parts["stored"].num_bytes if self._form in KEPT_FORMS else 0

    @property
    def _form(self) -> str:
        name = TYPES[self.kind][0]
        return name if name in _PLAIN else f"gguf:{name}"

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix over the blocks, with reordered rows sorted. Raises ModelError without gguf."""
        import torch

        from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange

        found = {"stored": parts["stored"]}
        if self._form in _PLAIN:
            found = {"values": parts["stored"].view(getattr(torch, _TORCH_NAMES[self._form]))}
        else:
            gguf_package()
        num_rows, width = self.shape
        matrix = StoredMatrix((StoredRange(self._form, num_rows, width, found),))
        if not self.turned_heads:
            return matrix
        order = torch.arange(self.shape[0]).view(self.turned_heads, -1, 2).transpose(1, 2)
        return matrix.rows(order.reshape(-1))


@dataclass(frozen=True)
class GgufModel:
    """Hold a file's model in the library's names and settings."""

    config: dict[str, object]
    tensors: dict[str, StoredTensor]
    layout: StoredLayout


def open_gguf(path: Path) -> GgufModel:
    """Read a model's description from the header alone.

    Raises ModelError for an architecture or a tensor that is not supported.
    """
    header = read_gguf(path)
    architecture = header.settings.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path}: a GGUF file of the architecture {architecture!r} is not read",
            hint=f"known: {', '.join(ARCHITECTURES)}; or use the model's safetensors",
        )
    config = _config(path, header, str(architecture))
    tensors: dict[str, StoredTensor] = {}
    made: dict[str, Unpacking] = {}
    for stored in header.tensors.values():
        if stored.name == _FACTORS:
            continue
        name, heads = _translated(stored, str(architecture), config)
        tensors[name] = replace(stored, name=name)
        if heads is not None or stored.dtype not in _PLAIN:
            made[name] = _rows(tensors[name], heads)
    return GgufModel(config, tensors, StoredLayout(made))


def gguf_package() -> Any:
    """Return the package that unpacks GGUF types. Raises ModelError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            "weights in a GGUF file need the package gguf", hint="pip install 'WHEEL[gguf]'"
        ) from error
    return gguf


def _rows(stored: StoredTensor, heads: int | None) -> GgufRows:
    kind = next(number for number, (name, _, _) in TYPES.items() if name == stored.dtype)
    if len(stored.shape) != 2 or stored.shape[0] % (2 * (heads or 1)) * (heads or 0):
        raise ModelError(
            f"{stored.path}: {stored.name} is {stored.dtype} of shape {list(stored.shape)}, expected a matrix"
            + (f" for {heads} heads" if heads else "")
        )
    row_bytes = stored.num_bytes // stored.shape[0]
    packed = replace(stored, dtype="U8", shape=(stored.shape[0], row_bytes))
    return GgufRows(stored.name, stored.shape, {"stored": packed}, kind, heads)


def _translated(
    stored: StoredTensor, architecture: str, config: Mapping[str, object]
) -> tuple[str, int | None]:
    """Return the library's name of a tensor, and the number of its heads if their rows are reordered."""
    if stored.name in _ENDS:
        return _ENDS[stored.name], None
    match = _LAYER.fullmatch(stored.name)
    if match is None or match[2] not in _PARTS:
        raise ModelError(f"{stored.path}: {stored.name} is not a tensor that Convoy knows in {architecture}")
    turned = FAMILIES[architecture].gguf_turned.get(match[2])
    heads = config.get(turned) if turned else None
    return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}", heads if isinstance(heads, int) else None


def _config(path: Path, header: GgufHeader, architecture: str) -> dict[str, object]:
    settings = header.settings
    config: dict[str, object] = {"model_type": architecture, "hidden_act": "silu"}
    for theirs, ours in _SETTINGS.items():
        value = settings.get(f"{architecture}.{theirs}")
        if value is not None:
            config[ours] = value
    tokens = settings.get("#tokenizer.ggml.tokens")
    embedding = header.tensors.get("token_embd.weight")
    if "vocab_size" not in config:
        config["vocab_size"] = embedding.shape[0] if embedding is not None else tokens
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["dtype"] = "float32"
    for word in ("bos", "eos"):
        config[f"{word}_token_id"] = settings.get(f"tokenizer.ggml.{word}_token_id")
    config["rope_parameters"] = _rope(path, header, architecture)
    _require_whole_turns(path, settings, architecture, config)
    return config


def _rope(path: Path, header: GgufHeader, architecture: str) -> dict[str, object]:
    settings = header.settings
    theta = settings.get(f"{architecture}.rope.freq_base", 10_000.0)
    # a base of 1 gives every frequency the same value, as all powers of 1 are equal
    if not isinstance(theta, float) or not is_above_0(theta) or theta == 1:
        raise ModelError(
            f"{path}: {architecture}.rope.freq_base is {theta!r}, expected a float above 0 other than 1"
        )
    kind = settings.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "linear":
        factor = settings.get(f"{architecture}.rope.scaling.factor")
        if not is_above_0(factor):
            raise ModelError(
                f"{path}: {architecture}.rope.scaling.factor is {factor!r}, expected a number above 0"
            )
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "none":
        raise ModelError(f"{path}: {architecture}.rope.scaling.type is {kind!r}, expected none or linear")
    stored = header.tensors.get(_FACTORS)
    if stored is None:
        return {"rope_type": "default", "rope_theta": theta}
    return _llama_3(stored, theta)


def _require_whole_turns(
    path: Path, settings: Mapping[str, object], architecture: str, config: Mapping[str, object]
) -> None:
    """Raise ModelError if only part of a head is rotated, or if an outdated key scales the frequencies."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head = config.get("head_dim") or (
        hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None
    )
    turned = settings.get(f"{architecture}.rope.dimension_count", head)
    if turned != head:
        raise ModelError(
            f"{path}: {architecture}.rope.dimension_count is {turned!r}, expected a whole head of {head}"
        )
    scale = settings.get(f"{architecture}.rope.scale_linear", 1.0)
    if scale != 1.0:
        raise ModelError(
            f"{path}: {architecture}.rope.scale_linear is {scale!r}, expected none or 1.0",
            hint="convert the model again: today's files have rope.scaling.* instead",
        )


def _llama_3(stored: StoredTensor, theta: float) -> dict[str, object]:
    """Return the RoPE settings that give the stored frequency factors. Raises ModelError if not Llama 3's."""
    import numpy as np

    from convoy.model.checkpoints.checkpoint import map_tensor

    if stored.dtype not in _PLAIN or len(stored.shape) != 1 or not stored.num_bytes:
        raise ModelError(
            f"{stored.path}: {stored.name} is {stored.dtype} of shape {list(stored.shape)}, expected a "
            "number for each frequency"
        )
    found = map_tensor(stored).double().numpy()
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise ModelError(f"{stored.path}: {stored.name} has numbers that are not above 0, or not finite")
    factor = float(found.max())
    lengths = 2 * np.pi * theta ** (np.arange(len(found)) / len(found))
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    turns = _LLAMA_3["original_max_position_embeddings"] / lengths
    share = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if not np.allclose(found, expected, rtol=1e-3):
        raise ModelError(f"{stored.path}: {stored.name} has frequencies that no Llama 3 has")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA_3}
