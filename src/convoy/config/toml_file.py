"""Read a TOML file that has a closed set of keys."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar, get_args

import msgspec

from convoy.config.type_resolution import resolved
from convoy.config.type_words import TOML_WORDS, in_words
from convoy.errors import ConfigError

_MAX_FILE_BYTES = 1 << 20
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")

S = TypeVar("S", bound=msgspec.Struct)


def read_toml(path: Path, kind: type[S]) -> S:
    """Return the file as a ``kind``. Raises `ConfigError` naming the file and the key, with the nearest known
    one.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}",
            hint="docs/fleet.md has an example, and without --config there are defaults",
        ) from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} has {len(data)} bytes, and the limit is {_MAX_FILE_BYTES}",
            hint="is it the right file? check the path",
        )
    try:
        return msgspec.convert(tomllib.loads(data.decode()), resolved(kind))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file", hint="is it the right file? check the path") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {str(error).lower()}") from None
    except msgspec.ValidationError as error:
        reason, key = in_words(str(error), TOML_WORDS)
        where = f"{path}: {key}" if key else path
        raise ConfigError(f"{where}: {reason}", hint=_nearest(str(error), kind)) from None


def _nearest(text: str, kind: type[msgspec.Struct]) -> str | None:
    found = _UNKNOWN.search(text)
    if found is None:
        return None
    near = difflib.get_close_matches(found[1], set(_names(kind)), n=1)
    return f"did you mean {near[0]}?" if near else None


def _names(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield the names of the keys of ``kind`` and of its tables."""
    for field in msgspec.structs.fields(kind):
        yield field.encode_name
        for one in (field.type, *get_args(field.type)):
            if isinstance(one, type) and issubclass(one, msgspec.Struct):
                yield from _names(one)
