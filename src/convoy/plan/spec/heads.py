"""Heads, windows and shared K/V of each layer, and the cache groups that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.compressed import compressed_groups
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, Family, LayerHeads

FULL, SLIDING = "full_attention", "sliding_attention"


def read_heads(
    reader: ConfigReader, family: Family, num_layers: int, hidden_size: int
) -> tuple[LayerHeads, ...]:
    """Return the attention of every layer.

    Raises ModelError, with both numbers, for heads that do not fit.
    """
    read = family.heads or alike_heads
    return read(reader, family, num_layers, hidden_size)


def alike_heads(
    reader: ConfigReader, family: Family, num_layers: int, hidden_size: int
) -> tuple[LayerHeads, ...]:
    """Return heads that are alike in all layers, with each layer's window. Raises as `read_heads` does."""
    windows = read_windows(reader, family, num_layers)
    alike = _heads(reader, family, hidden_size)
    return tuple(replace(alike, window=window) for window in windows)


def cache_groups(layers: Sequence[LayerHeads]) -> tuple[CacheGroup, ...]:
    """Return the groups of layers that keep K and V alike: full attention, windows by size, then states."""
    groups: dict[LayerHeads, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.kv_source is None:
            groups.setdefault(replace(layer, compression=None), []).append(number)
    compressions = [layer.compression for layer in layers]
    attending = tuple(
        CacheGroup(
            name=_group_name(heads),
            window=heads.window,
            layers=tuple(numbers),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            value_dim=heads.value_dim,
            kind=heads.kind,
            state_elements=heads.state_elements,
            num_taps=heads.num_taps,
        )
        for heads, numbers in sorted(groups.items(), key=_group_order)
    )
    return attending + compressed_groups(compressions, layers[0].num_heads, layers[0].head_dim)


def _group_name(heads: LayerHeads) -> str:
    if heads.is_state:
        return "state"
    return "full" if heads.window is None else f"window-{heads.window}"


def _group_order(group: tuple[LayerHeads, list[int]]) -> tuple[bool, int, list[int]]:
    heads, numbers = group
    return heads.is_state, heads.window or 0, numbers


def forbidden_cuts(layers: Sequence[LayerHeads]) -> Mapping[int, str]:
    """Return the cuts that part a layer from the source of its K and V: first layer after it -> reason."""
    cuts: dict[int, str] = {}
    for number, layer in enumerate(layers):
        if layer.kv_source is not None:
            for cut in range(layer.kv_source + 1, number + 1):
                cuts.setdefault(cut, f"layer {number} reads the K/V of layer {layer.kv_source}")
    return cuts


def _heads(reader: ConfigReader, family: Family, hidden_size: int) -> LayerHeads:
    num_heads = reader.count("num_attention_heads", most=MAX_WIDTH)
    num_kv_heads = reader.optional_count("num_key_value_heads", most=MAX_WIDTH) or num_heads
    check_divides(reader, "num_key_value_heads", num_kv_heads, num_heads)
    head_dim = reader.optional_count("head_dim", most=MAX_WIDTH)
    if hidden_size % num_heads and (family.divides_hidden or head_dim is None):
        raise reader.wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads = {num_heads}")
    head_dim = head_dim or hidden_size // num_heads
    check_head_dim(reader, "head_dim", head_dim, num_heads)
    return LayerHeads(num_heads, num_kv_heads, head_dim, head_dim)


def check_divides(reader: ConfigReader, key: str, num_kv_heads: int, num_heads: int) -> None:
    """Raise ModelError, naming the key, unless ``num_kv_heads`` divides ``num_heads``."""
    if num_heads % num_kv_heads:
        raise reader.wrong(key, num_kv_heads, f"a divisor of num_attention_heads = {num_heads}")


def check_head_dim(reader: ConfigReader, key: str, head_dim: int, num_heads: int) -> None:
    """Raise ModelError for an odd width of a head, and for heads that are too wide together."""
    if head_dim % 2:
        raise reader.wrong(key, head_dim, "an even number, because rotary positions turn pairs")
    if num_heads * head_dim > MAX_WIDTH:
        raise reader.wrong(
            "num_attention_heads", num_heads, f"at most {MAX_WIDTH // head_dim} heads of {head_dim}"
        )


def read_windows(reader: ConfigReader, family: Family, num_layers: int) -> list[int | None]:
    """Return the tokens that each layer looks back on; None: all of them."""
    if family.window is None:
        return [None] * num_layers
    if family.window == "by layer type":
        return _windows_by_type(reader, family, num_layers)
    window = reader.optional_count("sliding_window", most=MAX_CONTEXT)
    if family.window == "always":
        return [window] * num_layers
    if not reader.flag("use_sliding_window"):
        window = None
    if family.window == "if used":
        return [window] * num_layers
    kinds = _layer_types(reader, num_layers)
    if kinds is not None:
        return [window if kind == SLIDING else None for kind in kinds]
    # The only one of the four keys that may be 0: then every layer slides.
    first = reader.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise reader.wrong("max_window_layers", first, "a whole number from 0")
    return [window if layer >= first else None for layer in range(num_layers)]


def _windows_by_type(reader: ConfigReader, family: Family, num_layers: int) -> list[int | None]:
    kinds = kinds_of_layers(reader, family, num_layers, (FULL, SLIDING))
    if family.ends_full:
        kinds = (*kinds[:-1], FULL)
    window = reader.count("sliding_window", most=MAX_CONTEXT) if SLIDING in kinds else None
    return [window if kind == SLIDING else None for kind in kinds]


def kinds_of_layers(
    reader: ConfigReader, family: Family, num_layers: int, known: tuple[str, str]
) -> tuple[str, ...]:
    """Return layer_types, or else full layers at a fixed distance and the other ``known`` kind between."""
    kinds = _layer_types(reader, num_layers, known)
    if kinds is not None:
        return kinds
    every = family.full_every
    if family.full_every_key:
        every = reader.count(family.full_every_key, most=MAX_CONTEXT, default=every)
    return tuple(known[1] if (layer + 1) % every else FULL for layer in range(num_layers))


def pattern_of_layers(reader: ConfigReader, *, period: int) -> list[str]:
    """Return layer_types from a GGUF file's settings.

    ``period`` is the family's distance between full layers, for files without a pattern. A file without a
    window has full layers alone.
    """
    num_layers = reader.count("block_count", most=MAX_LAYERS)
    if not reader.get("attention.sliding_window"):
        return [FULL] * num_layers
    key = "attention.sliding_window_pattern"
    slides = reader.get(key)
    if not isinstance(slides, list):
        period = reader.count(key, most=MAX_LAYERS, default=period)
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if len(slides) != num_layers or not all(isinstance(one, bool) for one in slides):
        raise reader.wrong(key, slides, f"true or false for each of {num_layers} layers")
    return [SLIDING if one else FULL for one in slides]


def _layer_types(
    reader: ConfigReader, num_layers: int, known: tuple[str, str] = (FULL, SLIDING)
) -> tuple[str, ...] | None:
    kinds = reader.words("layer_types")
    if kinds is None:
        return None
    if len(kinds) != num_layers:
        raise reader.wrong(
            "layer_types", f"{len(kinds)} entries", f"num_hidden_layers = {num_layers} entries"
        )
    for kind in kinds:
        if kind not in known:
            raise reader.wrong("layer_types", kind, " or ".join(known))
    return kinds
