"""Checked reading of a `config.json`: every value is a claim until its type and range are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from convoy.errors import ModelError


class ConfigReader:
    """Read one model's configuration; every error names the model, the key and the value found.

    A multimodal wrapper keeps its decoder under ``text_config``: that part is read, and keys missing there
    (such as ``tie_word_embeddings``) are looked up in the wrapper.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        model: str,
        defaults: Mapping[str, object] | None = None,
        *,
        place: str = "config.json",
    ) -> None:
        self.model = model
        # Of the values, as errors name it.
        self._place = place
        self._outer = config
        self._defaults = {} if defaults is None else defaults
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise self.wrong("text_config", nested, "an object")
        self._inner: Mapping[str, object] = config if nested is None else nested

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigReader:
        """Return the same configuration, where an unwritten key has the value of ``defaults``."""
        return ConfigReader(self._outer, self.model, defaults, place=self._place)

    def get(self, key: str) -> object:
        """Return the raw value, or None if the key is null, or missing without a default."""
        value = self._inner.get(key)
        if value is None:
            value = self._outer.get(key)
        return self._defaults.get(key) if value is None and not self.has(key) else value

    def has(self, key: str) -> bool:
        """Return whether the key is written at all, null included."""
        return key in self._inner or key in self._outer

    def count(self, key: str, *, most: int, default: int | None = None) -> int:
        """Return an integer from 1 to ``most``.

        Raises ModelError if out of range, or missing without a default.
        """
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelError(
                    f"{self.model}: {self._place} has no {key}, expected a number from 1 to {most}",
                    hint=f"fetch the model's {self._place} again, or choose another model",
                )
            return default
        # A bool is an int to Python, and a careless converter writes 4096.0 as a float: both are refused.
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(key, value, f"a whole number from 1 to {most}")
        return value

    def optional_count(self, key: str, *, most: int) -> int | None:
        """Return the value as `count` does, but None if it is missing or null."""
        return None if self.get(key) is None else self.count(key, most=most)

    def optional_above_0(self, key: str) -> float | None:
        """Return a finite number above 0, or None if it is missing or null."""
        value = self.get(key)
        if value is None or is_above_0(value):
            return value
        raise self.wrong(key, value, "a number above 0")

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def word(self, key: str) -> str | None:
        """Return a string, or None if it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def words(self, key: str) -> tuple[str, ...] | None:
        """Return a list of strings, or None if it is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, value, "a list of strings")
        return tuple(value)

    def wrong(self, key: str, value: object, expected: str) -> ModelError:
        """Return the error for an impossible value, for the caller to raise."""
        shown = repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return ModelError(f"{self.model}: {self._place} says {key} = {shown}, expected {expected}")


def is_above_0(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number above 0.

    True is refused, though Python counts it as an int.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
