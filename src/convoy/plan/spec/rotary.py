"""The rotary positions of a `config.json`: each number is checked before it divides another."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from convoy.plan.spec.config import ConfigReader, is_above_0
from convoy.plan.spec.family import MAX_CONTEXT

_OBJECTS = ("rope_parameters", "rope_scaling")
_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
# Older files write these keys beside the objects above.
_BASES = ("rope_theta", "rope_local_base_freq", "compress_rope_theta")
# The keys by which the library looks up rotations of single types of layers.
_TYPES = frozenset(
    {"full_attention", "sliding_attention", "linear_attention", "chunked_attention", "main", "compress"}
)


def check_rotary(reader: ConfigReader) -> None:
    """Raise ModelError, naming the key, for values that give no rotation."""
    for key in _BASES:
        if (value := reader.get(key)) is not None:
            _check_base(reader, key, value)
    if (share := reader.get(_SHARE)) is not None:
        _check_share(reader, _SHARE, share)
    for name in _OBJECTS:
        rope = reader.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise reader.wrong(name, rope, "an object")
        _check_rope(reader, name, rope)
        for kind, part in rope.items():
            if isinstance(part, Mapping):
                _check_rope(reader, f"{name}.{kind}", part)
            elif kind in _TYPES and part is not None:
                raise reader.wrong(f"{name}.{kind}", part, "an object")


def max_context(reader: ConfigReader, long_ropes: Collection[str]) -> int:
    """Return the tokens for which a position has one rotation, after `check_rotary`. Raises ModelError.

    ``long_ropes`` are the words for a rotation like that of Phi-3: it rotates every position differently
    once a sequence is longer than the original context. No earlier K/V would be valid then, so the context
    ends there.
    """
    longest = reader.count("max_position_embeddings", most=MAX_CONTEXT)
    rope = reader.get("rope_parameters") or reader.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return longest
    if rope.get("rope_type", rope.get("type")) not in long_ropes:
        return longest
    # The key outside the object takes precedence over the one beside the factors.
    original = reader.optional_count(_ORIGINAL, most=MAX_CONTEXT)
    return min(longest, original or ConfigReader(rope, reader.model).count(_ORIGINAL, most=MAX_CONTEXT))


def _check_rope(reader: ConfigReader, name: str, rope: Mapping[str, object]) -> None:
    """Check every written value, null too: the library has defaults only for missing keys."""
    for key in ("rope_type", "type"):
        if key in rope and not isinstance(rope[key], str):
            raise reader.wrong(f"{name}.{key}", rope[key], "a string")
    if "rope_theta" in rope:
        _check_base(reader, f"{name}.rope_theta", rope["rope_theta"])
    if _SHARE in rope:
        _check_share(reader, f"{name}.{_SHARE}", rope[_SHARE])
    for key in ("factor", _ORIGINAL):
        if rope.get(key) is not None and not is_above_0(rope[key]):
            raise reader.wrong(f"{name}.{key}", rope[key], "a number above 0")


def _check_base(reader: ConfigReader, key: str, value: object) -> None:
    # Powers of 1 are all equal, and some rotations divide by its logarithm.
    if not is_above_0(value) or value == 1:
        raise reader.wrong(key, value, "a number above 0 other than 1")


def _check_share(reader: ConfigReader, key: str, value: object) -> None:
    """Check the share of a head that is rotated; some files set it alone, some by type of layer."""
    if not is_above_0(value) or value > 1:
        raise reader.wrong(key, value, "a number above 0 and at most 1")
