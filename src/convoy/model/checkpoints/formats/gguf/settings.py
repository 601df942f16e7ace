"""Make the library's config.json from the settings of a GGUF file, and from what its tensors show.

A setting's name begins with the architecture. The families' rows name the settings that only some of them
have, and read those that need more than a new name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.gguf.header import GgufHeader
from convoy.model.checkpoints.formats.gguf.names import FACTORS, PLAIN, GgufFamily
from convoy.plan.spec.config import ConfigReader, is_above_0
from convoy.plan.spec.family import MAX_LAYERS
from convoy.plan.spec.quantization import GGUF

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SETTINGS = {
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# the RoPE scaling of Llama 3.1 to 3.3; a file holds only the factors computed from it
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_NEXT = "nextn_predict_layers"
# of heads
_MAX_FACTORS = 1 << 16


def read_settings(path: Path, header: GgufHeader, found: GgufFamily) -> dict[str, object]:
    """Return the config.json of a model. Raises ModelError naming a setting that is missing or impossible."""
    form = found.form
    prefix = f"{form.architecture}."
    own = {
        key.removeprefix(prefix): value for key, value in header.settings.items() if key.startswith(prefix)
    }
    reader = ConfigReader(own, str(path), place="the header")
    config: dict[str, object] = {"model_type": found.family.model_type, "hidden_act": "silu"}
    for theirs, ours in {**_SETTINGS, **form.settings}.items():
        if own.get(theirs) is not None:
            config[ours] = own[theirs]
    layers = reader.count("block_count", most=MAX_LAYERS)
    # layers behind the last predict further tokens; Convoy does not run them
    beside = reader.count(_NEXT, most=layers - 1) if own.get(_NEXT) else 0
    config |= {"num_hidden_layers": layers - beside, "num_nextn_predict_layers": beside}
    config["vocab_size"] = _vocabulary(header, reader)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["dtype"] = "float32"
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        config[f"{ours}_token_id"] = header.settings.get(f"tokenizer.ggml.{theirs}_token_id")
    config |= form.fixed
    if form.read is not None:
        config |= form.read(reader, {name: tensor.shape for name, tensor in header.tensors.items()})
    _add_rotation(path, header, found, own, config)
    config["quantization_config"] = {"quant_method": GGUF}
    return config


def _vocabulary(header: GgufHeader, reader: ConfigReader) -> object:
    """Return the embedding's rows: converters remove rows that no token has, and keep the setting."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    return reader.get("vocab_size") or header.settings.get("#tokenizer.ggml.tokens")


def _add_rotation(
    path: Path,
    header: GgufHeader,
    found: GgufFamily,
    own: Mapping[str, object],
    config: dict[str, object],
) -> None:
    form, prefix = found.form, found.form.architecture
    if form.own_rotation:
        _add_proportion(header, config)
        return
    rope = _rope(path, header, prefix, own)
    if rope["rope_type"] == "llama3":
        _require_length(header.tensors["rope_freqs.weight"], _head(config))
    if rope["rope_type"] == "yarn":
        rope |= form.yarn
    config["rope_parameters"] = rope
    share = _share(path, prefix, own, config, partial=form.partial_rotation)
    if share is not None:
        rope["partial_rotary_factor"] = share
    sections = own.get("rope.dimension_sections")
    if isinstance(sections, list):
        rope |= {"mrope_section": [one for one in sections if one], "mrope_interleaved": True}


def _rope(path: Path, header: GgufHeader, architecture: str, own: Mapping[str, object]) -> dict[str, object]:
    theta = own.get("rope.freq_base", 10_000.0)
    # a base of 1 gives every frequency the same value, as all powers of 1 are equal
    if not isinstance(theta, float) or not is_above_0(theta) or theta == 1:
        raise ModelError(
            f"{path}: {architecture}.rope.freq_base is {theta!r}, expected a float above 0 other than 1"
        )
    factors = {
        word: _factors(header.tensors[name]) for name, word in FACTORS.items() if name in header.tensors
    }
    if "long_factor" in factors and "short_factor" in factors:
        return {"rope_type": "longrope", "rope_theta": theta, **_long(path, architecture, own, factors)}
    kind = own.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        return {"rope_type": kind, "rope_theta": theta, **_scaled(path, architecture, own, str(kind))}
    if kind != "none":
        raise ModelError(
            f"{path}: {architecture}.rope.scaling.type is {kind!r}, expected none, linear or yarn"
        )
    if "rope_freqs" in factors:
        return _llama_3(header.tensors["rope_freqs.weight"], factors["rope_freqs"], theta)
    return {"rope_type": "default", "rope_theta": theta}


def _scaled(path: Path, architecture: str, own: Mapping[str, object], kind: str) -> dict[str, object]:
    """Return the keys of a linear scaling, or of yarn."""
    factor = own.get("rope.scaling.factor")
    if not is_above_0(factor):
        raise ModelError(
            f"{path}: {architecture}.rope.scaling.factor is {factor!r}, expected a number above 0"
        )
    scaled: dict[str, object] = {"factor": factor}
    if kind == "linear":
        return scaled
    for theirs, expected in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("attn_factor", 1.0)):
        value = own.get(f"rope.scaling.{theirs}", expected)
        if value != expected:
            raise ModelError(
                f"{path}: {architecture}.rope.scaling.{theirs} is {value!r}, expected none or {expected}"
            )
    original = own.get("rope.scaling.original_context_length")
    if type(original) is not int or original < 1:
        raise ModelError(
            f"{path}: {architecture}.rope.scaling.original_context_length is {original!r}, expected a number "
            "of tokens"
        )
    scaled["original_max_position_embeddings"] = original
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if is_above_0(value := own.get(f"rope.scaling.{theirs}")):
            scaled[ours] = value
    multiplier = own.get("rope.scaling.yarn_log_multiplier")
    if is_above_0(multiplier):
        # the file has a tenth of it; one number stands for both, which cancel in the rotation
        scaled |= dict.fromkeys(("mscale", "mscale_all_dim"), round(multiplier * 10, 6))
    return scaled


def _long(
    path: Path, architecture: str, own: Mapping[str, object], factors: Mapping[str, npt.NDArray[np.float64]]
) -> dict[str, object]:
    """Return the keys of Phi-3's rotation, with factors for short and for long contexts."""
    reader = ConfigReader(own, f"{path}: {architecture}", place="the header")
    scaled: dict[str, object] = {word: factors[word].tolist() for word in ("long_factor", "short_factor")}
    scaled["original_max_position_embeddings"] = own.get("rope.scaling.original_context_length")
    attention = reader.optional_above_0("rope.scaling.attn_factor")
    return scaled if attention is None else {**scaled, "attention_factor": attention}


def _factors(stored: StoredTensor) -> npt.NDArray[np.float64]:
    """Return factors of frequencies. Raises ModelError if they are not a row of numbers above 0."""
    import numpy as np

    from convoy.model.checkpoints.checkpoint import map_tensor

    if stored.dtype not in PLAIN or len(stored.shape) != 1 or not 0 < stored.shape[0] <= _MAX_FACTORS:
        raise ModelError(
            f"{stored.path}: {stored.name} is {stored.dtype} of shape {list(stored.shape)}, expected a "
            "number for each frequency"
        )
    found: npt.NDArray[np.float64] = map_tensor(stored).double().numpy()
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise ModelError(f"{stored.path}: {stored.name} has numbers that are not above 0, or not finite")
    return found


def _share(
    path: Path, architecture: str, own: Mapping[str, object], config: Mapping[str, object], *, partial: bool
) -> float | None:
    """Return the share of a head that is rotated; None in a family that rotates heads whole.

    Raises ModelError if only part of a head is rotated in a family that rotates heads whole, or if an
    outdated key scales the frequencies.
    """
    head = _head(config)
    turned = own.get("rope.dimension_count", head)
    is_part = isinstance(head, int) and isinstance(turned, int) and 0 < turned <= head and turned % 2 == 0
    if turned != head and not (partial and is_part):
        raise ModelError(
            f"{path}: {architecture}.rope.dimension_count is {turned!r}, expected a whole head of {head}"
        )
    scale = own.get("rope.scale_linear", 1.0)
    if scale != 1.0:
        raise ModelError(
            f"{path}: {architecture}.rope.scale_linear is {scale!r}, expected none or 1.0",
            hint="convert the model again: today's files have rope.scaling.* instead",
        )
    if not partial or not isinstance(head, int) or not isinstance(turned, int):
        return None
    share = turned / head
    # the library multiplies and rounds down
    return share if int(head * share) == turned else math.nextafter(share, 1)


def _head(config: Mapping[str, object]) -> object:
    """Return the width of a head, or None if the settings do not say it."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return config.get("head_dim") or hidden // heads
    return config.get("head_dim")


def _require_length(stored: StoredTensor, head: object) -> None:
    """Raise ModelError unless there is a factor for each frequency of a head."""
    if isinstance(head, int) and stored.shape != (head // 2,):
        raise ModelError(
            f"{stored.path}: {stored.name} has {stored.shape[0]} numbers, expected one for each of "
            f"{head // 2} frequencies"
        )


def _add_proportion(header: GgufHeader, config: dict[str, object]) -> None:
    """Add the share of a head that rotates in full layers: the others' frequencies have huge factors."""
    stored = header.tensors.get("rope_freqs.weight")
    if stored is None:
        return
    found = _factors(stored)
    _require_length(stored, config.get("global_head_dim"))
    share = float((found == 1).mean())
    full = config.get("rope_parameters") or {}
    if isinstance(full, dict) and isinstance(full.get("full_attention"), dict):
        full["full_attention"]["partial_rotary_factor"] = share


def _llama_3(stored: StoredTensor, found: npt.NDArray[np.float64], theta: float) -> dict[str, object]:
    """Return the RoPE settings that give the stored frequency factors. Raises ModelError if not Llama 3's."""
    import numpy as np

    factor = float(found.max())
    lengths = 2 * np.pi * theta ** (np.arange(len(found)) / len(found))
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    turns = _LLAMA_3["original_max_position_embeddings"] / lengths
    share = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if not np.allclose(found, expected, rtol=1e-3):
        raise ModelError(f"{stored.path}: {stored.name} has frequencies that no Llama 3 has")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA_3}
