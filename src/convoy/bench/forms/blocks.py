"""Write a GGUF file of a synthetic Llama: drawn numbers, or blocks of random codes with one scale for all.

Codes are random because only their places matter to speed. The scale gives a matrix the variance of the
synthetic model's, 1 / inputs, so activations neither fade nor grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import DTYPES
from convoy.model.checkpoints.formats.gguf.header import TYPES
from convoy.model.checkpoints.formats.gguf.rows import gguf_package
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.plan.spec.families.llama import LLAMA

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

# The type of a matrix, by its name in the file.
ChooseType = Callable[[str, int], str]
_LAYOUT = {name: (inputs, size) for name, inputs, size in TYPES.values()}
# Six-bit scales and minima of 32 each, as ggml packs eight of both.
_K_SCALES = (*[0xA0] * 8, *[0] * 4)
_HALF = np.dtype("<f2")
_PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class _Fixed:
    """Hold the bytes of a block that are not codes.

    ``halves`` are the places of float16 numbers, as factors of the weights' spread; ``bytes`` are constants.
    """

    halves: Mapping[int, float]
    bytes: Mapping[int, tuple[int, ...]]


def level(levels: int) -> float:
    """Return the scale at which ``levels`` equally likely whole numbers have the variance 1."""
    return math.sqrt(12 / (levels**2 - 1))


_FIXED = {
    "Q8_0": _Fixed({0: level(256)}, {}),
    "Q5_1": _Fixed({0: level(32), 2: -15.5 * level(32)}, {}),
    "Q5_0": _Fixed({0: level(32)}, {}),
    "Q4_1": _Fixed({0: level(16), 2: -7.5 * level(16)}, {}),
    "Q4_0": _Fixed({0: level(16)}, {}),
    # The spread of its table is 69.
    "IQ4_NL": _Fixed({0: 1 / 69}, {}),
    "Q5_K": _Fixed({0: level(32) / 32, 2: 15.5 * level(32) / 32}, {4: _K_SCALES}),
    "Q4_K": _Fixed({0: level(16) / 32, 2: 7.5 * level(16) / 32}, {4: _K_SCALES}),
    "Q6_K": _Fixed({208: level(64) / 64}, {192: (64,) * 16}),
}
# The mean square of the magnitudes of E2M1.
E2M1_SQUARE = 68.5 / 8


def write_blocks(source: ModelSource, path: Path, choose: ChooseType) -> None:
    """Write a file with matrices of the types that ``choose`` gives for a name and a number of layers.

    One tensor is in memory at a time. Raises ModelError for a model that is no synthetic Llama, for rows
    that fill no blocks, and without the package `gguf`.
    """
    gguf = gguf_package()
    if source.spec.family != LLAMA or source.seed is None:
        raise ModelError(f"{source.name} is no synthetic Llama, and only these are written as GGUF")
    layers = source.spec.num_layers
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    file = gguf.GGUFWriter(path, LLAMA)
    _add_settings(file, source.config)
    types: dict[str, str] = {}
    for name, stored in source.tensors.items():
        own = names.get_name(name, try_suffixes=(".weight",))
        types[name] = kind = choose(own, layers) if len(stored.shape) == 2 else "F32"
        shape = _byte_shape(name, stored.shape, kind)
        raw = gguf.GGMLQuantizationType[kind]
        file.add_tensor_info(own, shape, np.dtype(np.uint8), math.prod(shape), raw)
    try:
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_ti_data_to_file()
        rng = np.random.Generator(np.random.Philox(1))
        for name, kind in types.items():
            file.write_tensor_data(_tensor(source, name, kind, rng))
    finally:
        file.close()


def _add_settings(file: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_block_count(config["num_hidden_layers"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(heads)
    file.add_head_count_kv(config["num_key_value_heads"])
    head = config.get("head_dim") or config["hidden_size"] // heads
    file.add_key_length(head)
    file.add_value_length(head)
    file.add_rope_dimension_count(head)
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_rope_freq_base(config.get("rope_parameters", {}).get("rope_theta", 10_000.0))
    file.add_vocab_size(config["vocab_size"])
    # Other programs need no text to measure; Convoy reads the tokeniser beside the file.
    file.add_tokenizer_model("no_vocab")


def _byte_shape(name: str, shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    inputs, size = _LAYOUT[kind]
    if shape[-1] % inputs:
        raise ModelError(f"{name} has rows of {shape[-1]} numbers, and {kind} has blocks of {inputs}")
    return (*shape[:-1], shape[-1] // inputs * size)


def _tensor(source: ModelSource, name: str, kind: str, rng: np.random.Generator) -> Bytes:
    """Return a tensor's bytes, uint8 [..., bytes of a row]."""
    import torch

    shape = source.tensors[name].shape
    if kind in _PLAIN:
        values = read_tensor(source, name).to(getattr(torch, DTYPES[kind][0]))
        plain: Bytes = values.view(torch.uint8).numpy()
        return plain
    inputs, size = _LAYOUT[kind]
    blocks = np.frombuffer(rng.bytes(math.prod(shape) // inputs * size), np.uint8).reshape(-1, size).copy()
    spread = 1 / math.sqrt(shape[-1])
    if kind == "MXFP4":
        blocks[:, 0] = 127 + round(math.log2(spread / math.sqrt(E2M1_SQUARE)))
    else:
        for place, factor in _FIXED[kind].halves.items():
            blocks[:, place : place + 2] = np.array([factor * spread], _HALF).view(np.uint8)
        for place, values_ in _FIXED[kind].bytes.items():
            blocks[:, place : place + len(values_)] = np.array(values_, np.uint8)
    if kind == "Q4_0":
        _centre(blocks[:, 2:])
    return blocks.reshape(*shape[:-1], -1)


def _centre(codes: Bytes) -> None:
    """Replace the code -8 by 0 among two codes of 4 bits in each byte, so that their mean is 0.

    With a mean of -1/2, the outputs of a matrix share a part that grows from layer to layer. Scores then
    differ so much that shares of attention are subnormal, which some processors multiply slowly.
    """
    codes[codes & 0x0F == 0] |= 0x08
    codes[codes & 0xF0 == 0] |= 0x80
