"""Heads, windows and shared K/V of each layer, and the cache groups that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from convoy.plan.spec.cache import STATE_TILE, CacheGroup, CacheKind
from convoy.plan.spec.compressed import Compression, compressed_groups, read_compressions
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, Family

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class LayerHeads:
    """Describe the attention of one layer."""

    num_heads: int
    num_kv_heads: int
    # Of queries and keys.
    head_dim: int
    value_dim: int
    # Tokens that it looks back on, its own included; None: all of them.
    window: int | None = None
    # The layer that it reads K and V of; None: it has its own.
    kv_source: int | None = None
    kind: CacheKind = "kv"
    # Of a delta net, where heads are those of keys and values.
    num_taps: int = 0
    # Of the tokens behind the window.
    compression: Compression | None = None

    @property
    def mixed_width(self) -> int:
        """Return the width of a delta net's convolution: queries, keys and values."""
        return 2 * self.num_kv_heads * self.head_dim + self.num_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Return the elements that a delta net keeps of a sequence, as `model.kv.delta_batch` lays them out.

        For attention it is 0.
        """
        if self.kind != "recurrent":
            return 0
        past = (self.num_taps - 1) * self.mixed_width
        state = self.num_heads * self.head_dim * self.value_dim
        kept = self.num_kv_heads * self.head_dim + self.num_heads * (self.value_dim + 2)
        return past + state + STATE_TILE * kept


def read_heads(
    reader: ConfigReader, family: Family, num_layers: int, hidden_size: int
) -> tuple[LayerHeads, ...]:
    """Return the attention of every layer.

    Raises ModelError, with both numbers, for heads that do not fit.
    """
    if family.heads == "compressed":
        return _compressed_heads(reader, num_layers)
    windows = _windows(reader, family, num_layers)
    latent = family.heads == "latent"
    alike = _latent_heads(reader) if latent else _heads(reader, family, hidden_size)
    layers = [replace(alike, window=window) for window in windows]
    if family.heads == "by layer type":
        layers = _heads_by_layer(reader, layers)
        layers = _shared(reader, layers)
    if family.recurrent:
        delta = _delta_heads(reader)
        kinds = _kinds_of_layers(reader, family, num_layers, (FULL, LINEAR))
        layers = [delta if kind == LINEAR else layer for kind, layer in zip(kinds, layers, strict=True)]
    return tuple(layers)


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
    if heads.kind == "recurrent":
        return "state"
    return "full" if heads.window is None else f"window-{heads.window}"


def _group_order(group: tuple[LayerHeads, list[int]]) -> tuple[bool, int, list[int]]:
    heads, numbers = group
    return heads.kind == "recurrent", heads.window or 0, numbers


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
    _check_divides(reader, "num_key_value_heads", num_kv_heads, num_heads)
    head_dim = reader.optional_count("head_dim", most=MAX_WIDTH)
    if hidden_size % num_heads and (family.divides_hidden or head_dim is None):
        raise reader.wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads = {num_heads}")
    head_dim = head_dim or hidden_size // num_heads
    _check_head_dim(reader, "head_dim", head_dim, num_heads)
    return LayerHeads(num_heads, num_kv_heads, head_dim, head_dim)


def _check_divides(reader: ConfigReader, key: str, num_kv_heads: int, num_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise reader.wrong(key, num_kv_heads, f"a divisor of num_attention_heads = {num_heads}")


def _check_head_dim(reader: ConfigReader, key: str, head_dim: int, num_heads: int) -> None:
    if head_dim % 2:
        raise reader.wrong(key, head_dim, "an even number, because rotary positions turn pairs")
    if num_heads * head_dim > MAX_WIDTH:
        raise reader.wrong(
            "num_attention_heads", num_heads, f"at most {MAX_WIDTH // head_dim} heads of {head_dim}"
        )


def _latent_heads(reader: ConfigReader) -> LayerHeads:
    """Return heads that share one latent a token, with the rotary part of its key."""
    num_heads = reader.count("num_attention_heads", most=MAX_WIDTH)
    num_kv_heads = reader.optional_count("num_key_value_heads", most=MAX_WIDTH) or num_heads
    if num_kv_heads != num_heads:
        raise reader.wrong("num_key_value_heads", num_kv_heads, f"num_attention_heads = {num_heads}")
    rotary = reader.count("qk_rope_head_dim", most=MAX_WIDTH)
    _check_head_dim(reader, "qk_rope_head_dim", rotary, 1)
    latent = reader.count("kv_lora_rank", most=MAX_WIDTH)
    return LayerHeads(num_heads, 1, latent + rotary, latent, kind="latent")


def _delta_heads(reader: ConfigReader) -> LayerHeads:
    """Return the heads of a gated delta net: one state of keys by values for each head of values."""
    num_keys = reader.count("linear_num_key_heads", most=MAX_WIDTH)
    num_values = reader.count("linear_num_value_heads", most=MAX_WIDTH)
    if num_values % num_keys:
        raise reader.wrong(
            "linear_num_value_heads", num_values, f"a multiple of linear_num_key_heads = {num_keys}"
        )
    key_dim = reader.count("linear_key_head_dim", most=MAX_WIDTH // num_keys)
    value_dim = reader.count("linear_value_head_dim", most=MAX_WIDTH // num_values)
    num_taps = reader.count("linear_conv_kernel_dim", most=MAX_LAYERS)
    if num_taps < 2:
        raise reader.wrong("linear_conv_kernel_dim", num_taps, "2 or more")
    return LayerHeads(num_values, num_keys, key_dim, value_dim, kind="recurrent", num_taps=num_taps)


def _compressed_heads(reader: ConfigReader, num_layers: int) -> tuple[LayerHeads, ...]:
    """Return heads with one key a token, which is its value too, and the layers' entries beyond."""
    num_heads = reader.count("num_attention_heads", most=MAX_WIDTH)
    head_dim = reader.count("head_dim", most=MAX_WIDTH)
    _check_head_dim(reader, "head_dim", head_dim, num_heads)
    _check_divides(reader, "o_groups", reader.count("o_groups", most=MAX_WIDTH), num_heads)
    window = reader.count("sliding_window", most=MAX_CONTEXT)
    alike = LayerHeads(num_heads, 1, head_dim, head_dim, window, kind="latent")
    return tuple(replace(alike, compression=made) for made in read_compressions(reader, num_layers))


def _heads_by_layer(reader: ConfigReader, layers: Sequence[LayerHeads]) -> list[LayerHeads]:
    """Return the layers with other heads for full attention, or for any layer that per_layer_config names."""
    written = reader.get("per_layer_config")
    if written is not None:
        return _overridden(reader, written, layers)
    head_dim = reader.count("global_head_dim", most=MAX_WIDTH)
    num_kv_heads = None
    if reader.flag("attention_k_eq_v"):
        num_kv_heads = reader.optional_count("num_global_key_value_heads", most=MAX_WIDTH)
    return [
        layer
        if layer.window is not None
        else _other_heads(reader, layer, head_dim, num_kv_heads or layer.num_kv_heads)
        for layer in layers
    ]


def _overridden(reader: ConfigReader, written: object, layers: Sequence[LayerHeads]) -> list[LayerHeads]:
    if not isinstance(written, Mapping):
        raise reader.wrong("per_layer_config", written, "an object")
    changed = list(layers)
    for key, values in written.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and int(key) < len(layers)):
            raise reader.wrong("per_layer_config", key, f"numbers of layers from 0 to {len(layers) - 1}")
        if not isinstance(values, Mapping) or not values.keys() <= {"head_dim", "num_key_value_heads"}:
            raise reader.wrong(f"per_layer_config.{key}", values, "head_dim and num_key_value_heads alone")
        here = ConfigReader(values, reader.model)
        layer = layers[int(key)]
        head_dim = here.count("head_dim", most=MAX_WIDTH, default=layer.head_dim)
        num_kv_heads = here.count("num_key_value_heads", most=MAX_WIDTH, default=layer.num_kv_heads)
        changed[int(key)] = _other_heads(reader, layer, head_dim, num_kv_heads)
    return changed


def _other_heads(reader: ConfigReader, layer: LayerHeads, head_dim: int, num_kv_heads: int) -> LayerHeads:
    _check_head_dim(reader, "global_head_dim", head_dim, layer.num_heads)
    _check_divides(reader, "num_global_key_value_heads", num_kv_heads, layer.num_heads)
    return replace(layer, head_dim=head_dim, value_dim=head_dim, num_kv_heads=num_kv_heads)


def _shared(reader: ConfigReader, layers: Sequence[LayerHeads]) -> list[LayerHeads]:
    """Return the layers, with the source of K and V for the last ``num_kv_shared_layers``.

    The source is the last earlier layer of the same type.
    """
    if not reader.get("num_kv_shared_layers"):
        return list(layers)
    num_shared = reader.count("num_kv_shared_layers", most=len(layers) - 1)
    first = len(layers) - num_shared
    sources = {layer.window: number for number, layer in enumerate(layers[:first])}
    shared = []
    for number, layer in enumerate(layers):
        if number < first:
            shared.append(layer)
            continue
        source = sources.get(layer.window)
        if source is None or replace(layer, kv_source=None) != layers[source]:
            raise reader.wrong("num_kv_shared_layers", num_shared, "fewer: no layer before them is alike")
        shared.append(replace(layer, kv_source=source))
    return shared


def _windows(reader: ConfigReader, family: Family, num_layers: int) -> list[int | None]:
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
    kinds = _kinds_of_layers(reader, family, num_layers, (FULL, SLIDING))
    if family.heads == "by layer type":
        # The loader makes the last layer a full one in any case.
        kinds = (*kinds[:-1], FULL)
    window = reader.count("sliding_window", most=MAX_CONTEXT) if SLIDING in kinds else None
    return [window if kind == SLIDING else None for kind in kinds]


def _kinds_of_layers(
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
