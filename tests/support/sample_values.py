"""Make deterministic values of a message class from its field types alone.

The same class always gives the same instance, and neighbouring fields of one type get different values. Two
builds that encode an instance to the same bytes therefore agree about the order, types and tag of its fields.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

# Texts for the patterns of the wire. The first that matches is taken.
_TEXTS = ("ab" * 32, "cd" * 16, "org/name@" + "ef" * 20, "alpha", "tpm2")


def sample(kind: type[Any], *, optional: bool = True) -> Any:
    """Return an instance of ``kind``. Without ``optional``, fields with a default keep it.

    Raises ValueError for a constraint that no value here meets.
    """
    found = inspect.type_info(kind)
    return msgspec.convert(_value(found, itertools.count(1), optional), kind)


def _value(kind: Any, numbers: Iterator[int], optional: bool) -> Any:
    """Return one value of ``kind``, built from ``numbers`` in order."""
    if isinstance(kind, inspect.StructType):
        return _struct(kind, numbers, optional)
    scalar = _SCALARS.get(type(kind))
    return _of_several(kind, numbers, optional) if scalar is None else scalar(kind, next(numbers))


def _of_several(kind: Any, numbers: Iterator[int], optional: bool) -> Any:
    value: Any
    match kind:
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            most = 2 if kind.max_length is None else min(2, kind.max_length)
            value = [_value(item, numbers, optional) for _ in range(max(most, kind.min_length or 0))]
        case inspect.TupleType(item_types=items):
            value = [_value(item, numbers, optional) for item in items]
        case inspect.DictType(key_type=key, value_type=entry):
            value = {_value(key, numbers, optional): _value(entry, numbers, optional)}
        case inspect.UnionType(types=types):
            first = next(one for one in types if not isinstance(one, inspect.NoneType))
            value = _value(first, numbers, optional)
        case _:
            raise ValueError(f"no sample value for {kind}")
    return value


def _struct(kind: Any, numbers: Iterator[int], optional: bool) -> Any:
    taken = [field for field in kind.fields if field.required or optional]
    values = [_value(field.type, numbers, optional) for field in taken]
    if kind.array_like:
        return [*([] if kind.tag is None else [kind.tag]), *values]
    tag = {} if kind.tag is None else {kind.tag_field: kind.tag}
    return tag | {field.encode_name: value for field, value in zip(taken, values, strict=True)}


def _number(kind: Any, wanted: float) -> float:
    least = kind.ge if kind.ge is not None else kind.gt + 1 if kind.gt is not None else wanted
    most = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else wanted
    value: float = max(least, min(most, wanted))
    return value


def _text(kind: Any, number: int) -> str:
    if kind.pattern is not None:
        fitting = [text for text in (*_TEXTS, "") if re.search(kind.pattern, text)]
        if not fitting:
            raise ValueError(f"no sample text matches {kind.pattern}")
        return fitting[0]
    text = f"text-{number}"
    return text if kind.max_length is None else text[: kind.max_length]


def _bytes(kind: Any, number: int) -> bytes:
    most = 5 if kind.max_length is None else kind.max_length
    return bytes((number + index) % 256 for index in range(min(max(kind.min_length or 0, 5), most)))


def _literal(kind: Any, number: int) -> Any:
    return sorted(kind.values, key=str)[number % len(kind.values)]


_SCALARS: dict[type, Callable[[Any, int], Any]] = {
    inspect.IntType: _number,
    inspect.FloatType: lambda kind, number: _number(kind, number / 8),
    inspect.BoolType: lambda _, number: number % 2 == 1,
    inspect.StrType: _text,
    inspect.BytesType: _bytes,
    inspect.LiteralType: _literal,
    inspect.EnumType: lambda kind, number: list(kind.cls)[number % len(kind.cls)].value,
    inspect.NoneType: lambda _kind, _number: None,
    inspect.AnyType: lambda _, number: number,
}
