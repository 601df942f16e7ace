"""Checked reading of a `config.json`: every value is taken for a claim until its type and range are seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from convoy.errors import ModelError


class ConfigReader:
    """One model's configuration; every error names the model, the key and the value found.

    A multimodal wrapper keeps its decoder under ``text_config``: that part is read, and keys which it lacks
    (such as ``tie_word_embeddings``) are looked up in the wrapper.
    """

    def __init__(
        self, config: Mapping[str, object], model: str, defaults: Mapping[str, object] | None = None
    ) -> None:
        self.model = model
        self._outer = config
        self._defaults = {} if defaults is None else defaults
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise self.wrong("text_config", nested, "an object")
        self._inner: Mapping[str, object] = config if nested is None else nested

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigReader:
        """The same configuration, where a key that is not written has the value of ``defaults``."""
        return ConfigReader(self._outer, self.model, defaults)

    def get(self, key: str) -> object:
        """The raw value, or None where the key is null, or missing without a default."""
        value = self._inner.get(key)
        if value is None:
            value = self._outer.get(key)
        return self._defaults.get(key) if value is None and not self.has(key) else value

    def has(self, key: str) -> bool:
        """Whether the key is written at all, null included."""
        return key in self._inner or key in self._outer

    def count(self, key: str, *, most: int, default: int | None = None) -> int:
        """An integer from 1 to ``most``; ModelError if out of range, or missing without a default."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelError(
                    f"{self.model}: config.json has no {key}, expected a number from 1 to {most}"
                )
            return default
        # bool is an int to Python, and 4096.0 is a float to nobody but a careless converter: both are refused
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(key, value, f"a whole number from 1 to {most}")
        return value

    def optional_count(self, key: str, *, most: int) -> int | None:
        """As `count`, but missing or null is None."""
        return None if self.get(key) is None else self.count(key, most=most)

    def optional_above_0(self, key: str) -> float | None:
        """A finite number above 0, or None where it is missing or null."""
        value = self.get(key)
        if value is None or is_above_0(value):
            return value
        raise self.wrong(key, value, "a number above 0")

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def word(self, key: str) -> str | None:
        """A string, or None where it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def words(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where it is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, value, "a list of strings")
        return tuple(value)

    def wrong(self, key: str, value: object, expected: str) -> ModelError:
        """The error for a value that cannot be true, for the caller to raise."""
        shown = repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return ModelError(f"{self.model}: config.json says {key} = {shown}, expected {expected}")


def is_above_0(value: object) -> TypeGuard[float]:
    """Whether it is a finite number above 0; true is none, though an int to Python."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
