"""The families Convoy can plan, and their differences as data.

Every rule here was read from the family's configuration and modelling code in `transformers`, defaults
included: a missing key must mean to the plan what it means to the loader.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoy.errors import ModelError
from convoy.plan.cache import CacheGroup
from convoy.plan.config import ConfigReader

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # hidden, intermediate and attention widths
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 27


@dataclass(frozen=True)
class Family:
    """What sets one Llama-shaped family apart from the next."""

    model_type: str
    qkv_bias: bool | None  # None: the key attention_bias decides
    out_bias: bool  # whether attention_bias reaches o_proj too
    mlp_bias: bool  # whether the key mlp_bias counts
    qk_norm: bool  # RMS norms over each head's query and key
    kv_heads_default: int | None  # None: as many as query heads
    head_dim_default: int | None  # None: hidden_size / num_attention_heads
    window: str | None  # "always": sliding_window; "by layer": layer_types or max_window_layers
    divides_hidden: bool  # the loader refuses a hidden_size that the heads do not divide


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", None, True, True, False, None, None, None, True),
        Family("mistral", False, False, False, False, 8, None, "always", False),
        Family("qwen2", True, False, False, False, 32, None, "by layer", False),
        Family("qwen3", None, True, False, True, 32, 128, "by layer", False),
    )
}


@dataclass(frozen=True)
class Attention:
    """Heads of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_family(reader: ConfigReader) -> Family:
    """The family of a configuration; ModelError names an unsupported type and those that are supported."""
    model_type = reader.word("model_type")
    if model_type is None:
        raise ModelError(f"{reader.model}: config.json has no model_type", hint=_supported())
    if model_type not in FAMILIES:
        raise ModelError(f"{reader.model}: model type {model_type!r} is not supported", hint=_supported())
    if reader.get("quantization_config") is not None:
        raise ModelError(
            f"{reader.model}: config.json has a quantization_config, expected unquantised weights",
            hint="use the model's float32, bfloat16 or float16 weights",
        )
    return FAMILIES[model_type]


def _supported() -> str:
    return f"supported types: {', '.join(sorted(FAMILIES))}"


def read_attention(reader: ConfigReader, family: Family, hidden_size: int) -> Attention:
    """Head counts that divide what they must; ModelError with both numbers where they do not."""
    num_heads = reader.count("num_attention_heads", most=MAX_WIDTH)
    num_kv_heads = reader.count(
        "num_key_value_heads", most=MAX_WIDTH, default=family.kv_heads_default or num_heads
    )
    if num_heads % num_kv_heads:
        raise reader.wrong(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}"
        )
    default_dim = family.head_dim_default
    head_dim = reader.optional_count("head_dim", most=MAX_WIDTH)
    if hidden_size % num_heads and (family.divides_hidden or (head_dim or default_dim) is None):
        raise reader.wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads = {num_heads}")
    head_dim = head_dim or default_dim or hidden_size // num_heads
    if head_dim % 2:
        raise reader.wrong("head_dim", head_dim, "an even number, because rotary positions turn pairs")
    if num_heads * head_dim > MAX_WIDTH:
        raise reader.wrong(
            "num_attention_heads", num_heads, f"at most {MAX_WIDTH // head_dim} heads of {head_dim}"
        )
    return Attention(num_heads, num_kv_heads, head_dim)


def layer_elements(reader: ConfigReader, family: Family, hidden_size: int, attention: Attention) -> int:
    """Weight elements of one decoder layer."""
    intermediate_size = reader.count("intermediate_size", most=MAX_WIDTH)
    query = attention.num_heads * attention.head_dim
    key_value = attention.num_kv_heads * attention.head_dim
    elements = (
        hidden_size * (2 * query + 2 * key_value) + 3 * hidden_size * intermediate_size + 2 * hidden_size
    )
    attention_bias = reader.flag("attention_bias") if family.qkv_bias is None else family.qkv_bias
    if attention_bias:
        elements += query + 2 * key_value + (hidden_size if family.out_bias else 0)
    if family.mlp_bias and reader.flag("mlp_bias"):
        elements += 2 * intermediate_size + hidden_size
    if family.qk_norm:
        elements += 2 * attention.head_dim
    return elements


def read_cache_groups(
    reader: ConfigReader, family: Family, num_layers: int, attention: Attention
) -> tuple[CacheGroup, ...]:
    """The layers by what they retain: full attention first, then windows by size."""
    heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.head_dim)
    groups: dict[int | None, list[int]] = {}
    for layer, window in enumerate(_layer_windows(reader, family, num_layers)):
        groups.setdefault(window, []).append(layer)
    return tuple(
        CacheGroup("full" if window is None else f"window-{window}", window, tuple(layers), *heads)
        for window, layers in sorted(groups.items(), key=lambda item: item[0] or 0)
    )


def _layer_windows(reader: ConfigReader, family: Family, num_layers: int) -> list[int | None]:
    if family.window is None:
        return [None] * num_layers
    if family.window == "always":
        default = None if reader.has("sliding_window") else 4096
        return [reader.optional_count("sliding_window", most=MAX_CONTEXT) or default] * num_layers
    return _windows_by_layer(reader, num_layers)


def _windows_by_layer(reader: ConfigReader, num_layers: int) -> list[int | None]:
    window: int | None = None
    if reader.flag("use_sliding_window"):
        window = reader.optional_count("sliding_window", most=MAX_CONTEXT)
        if window is None and not reader.has("sliding_window"):
            window = 4096
    kinds = reader.words("layer_types")
    if kinds is None:
        # the one key of the four that may truly be 0: every layer slides
        first = reader.get("max_window_layers")
        first = 28 if first is None else first
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise reader.wrong("max_window_layers", first, "a whole number from 0")
        return [window if layer >= first else None for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise reader.wrong(
            "layer_types", f"{len(kinds)} entries", f"num_hidden_layers = {num_layers} entries"
        )
    for kind in kinds:
        if kind not in {"full_attention", "sliding_attention"}:
            raise reader.wrong("layer_types", kind, "full_attention or sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]
