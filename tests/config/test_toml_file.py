"""Files with a closed set of keys: a wrong value or key is named, in words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from convoy.config.toml_file import read_toml
from convoy.errors import ConfigError


class Price(msgspec.Struct, forbid_unknown_fields=True):
    prompt_micro: int = 0


class Prices(msgspec.Struct, forbid_unknown_fields=True):
    model: list[Price] = []


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"[[model]]\nprompt_micro = 'x'", "model[0].prompt_micro: expected a whole number, got text", None),
        (
            b"[[model]]\npromt_micro = 1",
            "model[0]: object contains unknown field",
            "did you mean prompt_micro?",
        ),
        (b"model = = 1", "is not TOML: ", None),
        (b"\x7fELF\xff\xfe", "is not a text file", "is it the right file? check the path"),
    ],
)
def test_a_wrong_file_is_refused_in_words(
    tmp_path: Path, content: bytes, message: str, hint: str | None
) -> None:
    file = tmp_path / "prices.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_toml(file, Prices)
    assert message in raised.value.message
    assert str(file) in raised.value.message
    assert raised.value.hint == hint


def test_a_file_is_read_into_its_type(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text("[[model]]\nprompt_micro = 3\n", encoding="utf-8")
    assert read_toml(file, Prices).model == [Price(3)]
