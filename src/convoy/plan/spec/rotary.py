"""The rotary positions of a `config.json`: each number is seen before anything divides by it."""

from __future__ import annotations

from collections.abc import Mapping

from convoy.plan.spec.config import ConfigReader, is_above_0
from convoy.plan.spec.family import MAX_CONTEXT

_OBJECTS = ("rope_parameters", "rope_scaling")
_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
# beside the objects above, as older files have them
_BASES = ("rope_theta", "rope_local_base_freq", "compress_rope_theta")
# what the library looks rotations of single types of layers up by
_TYPES = frozenset(
    {"full_attention", "sliding_attention", "linear_attention", "chunked_attention", "main", "compress"}
)


def check_rotary(reader: ConfigReader) -> None:
    """Raises ModelError, naming the key, for what no rotation can be made of."""
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


def max_context(reader: ConfigReader) -> int:
    """Tokens for which a position has one rotation. For what `check_rotary` has seen; raises ModelError.

    The "longrope" of Phi-3 and Phi-4 turns every position otherwise once a sequence is longer than the
    original context, so that nothing computed before would be of use: there the context ends.
    """
    longest = reader.count("max_position_embeddings", most=MAX_CONTEXT)
    rope = reader.get("rope_parameters") or reader.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return longest
    # Phi-3's loader takes these three words for one
    kinds = {"longrope", "su", "yarn"} if reader.word("model_type") == "phi3" else {"longrope"}
    if rope.get("rope_type", rope.get("type")) not in kinds:
        return longest
    original = reader.optional_count(_ORIGINAL, most=MAX_CONTEXT)  # before what stands beside the factors
    return min(longest, original or ConfigReader(rope, reader.model).count(_ORIGINAL, most=MAX_CONTEXT))


def _check_rope(reader: ConfigReader, name: str, rope: Mapping[str, object]) -> None:
    """What is written counts, null too: the library has its defaults for keys that are not there alone."""
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
    # powers of 1 are all alike, and some rotations divide by its logarithm
    if not is_above_0(value) or value == 1:
        raise reader.wrong(key, value, "a number above 0 other than 1")


def _check_share(reader: ConfigReader, key: str, value: object) -> None:
    """No more of a head is turned than there is: some write the share by itself, some for types of layers."""
    if not is_above_0(value) or value > 1:
        raise reader.wrong(key, value, "a number above 0 and at most 1")
