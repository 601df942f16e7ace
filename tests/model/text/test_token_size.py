"""How much text one token stands for, and where no bound may be trusted."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from convoy.model.text.token_size import (
    GENEROUS_TOKEN_BYTES,
    longest_token_bytes,
    most_message_bytes,
    most_text_bytes,
)
from convoy.model.text.vocabulary import BYTE_OF
from support import tiny_tokenizers as tiny


def bound(backend: Tokenizer) -> int | None:
    return longest_token_bytes(json.loads(backend.to_str()), BYTE_OF)


def test_a_byte_level_vocabulary_has_its_longest_entry() -> None:
    assert bound(tiny.byte_level()) == 16  # its run of spaces


def test_a_vocabulary_with_byte_fallback_has_its_longest_entry() -> None:
    assert bound(tiny.sentence_piece()) == len("<0xFF>")


@pytest.mark.parametrize("form", [normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD])
def test_a_normal_form_may_shrink_text_fourfold(form: Any) -> None:
    backend = tiny.byte_level()
    backend.normalizer = form()
    assert bound(backend) == 64


def test_a_replacement_by_fewer_bytes_counts() -> None:
    backend = tiny.byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.Replace("abcd", "xy"), normalizers.NFC()])
    assert bound(backend) == 128


NOT_TRUSTED = {
    "strips white space": lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
    "deletes accents": lambda backend: setattr(backend, "normalizer", normalizers.StripAccents()),
    "deletes by replacement": lambda backend: setattr(backend, "normalizer", normalizers.Replace("a", "")),
    "replaces by a pattern": lambda backend: setattr(
        backend, "normalizer", normalizers.Replace(Regex("a+"), "a")
    ),
    "drops what lies between words": lambda backend: setattr(
        backend,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), backend.pre_tokenizer]),
    ),
    "drops what a split finds": lambda backend: setattr(
        backend,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), backend.pre_tokenizer]),
    ),
}


@pytest.mark.parametrize("change", NOT_TRUSTED.values(), ids=NOT_TRUSTED.keys())
def test_a_tokenizer_that_deletes_text_has_no_bound(change: Any) -> None:
    backend = tiny.byte_level()
    change(backend)
    assert bound(backend) is None


def test_a_token_that_takes_the_space_beside_it_has_no_bound() -> None:
    from tokenizers import AddedToken

    backend = tiny.byte_level()
    backend.add_special_tokens([AddedToken("<|x|>", rstrip=True)])
    assert bound(backend) is None


def test_unknown_text_that_becomes_one_token_has_no_bound() -> None:
    assert bound(tiny.unigram()) is None
    vocab = {"<unk>": 0, "a": 1}
    assert bound(Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True))) is None
    assert bound(Tokenizer(models.BPE(vocab, []))) is None  # what it does not know it leaves out
    assert bound(Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))) is None
    assert bound(Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))) == 5


def test_without_a_bound_the_limit_is_generous() -> None:
    assert most_text_bytes(100_000, 16) == 1_600_000
    assert most_text_bytes(100_000, None) == 100_000 * GENEROUS_TOKEN_BYTES
    assert most_text_bytes(10, None) == 256 * 1024
    assert most_message_bytes(100_000, 16) == 100_000 * GENEROUS_TOKEN_BYTES
    assert most_message_bytes(100_000, 200) == 20_000_000


@functools.cache
def backends() -> list[Tokenizer]:
    """Make the tokenisers. Training them starts threads, so they are not made where this file is imported."""
    made = [tiny.byte_level(), tiny.sentence_piece()]
    for each in normalizers.NFC(), normalizers.NFKC(), normalizers.Replace("hello", "h"):
        made.append(tiny.byte_level())
        made[-1].normalizer = each
    return made


@given(
    text=st.lists(
        st.one_of(st.text(max_size=8), st.sampled_from(["hello", " " * 40, "\u212b\u0301", "\U0001d400"])),
        max_size=20,
    ).map("".join),
    backend=st.deferred(lambda: st.sampled_from(backends())),
)
def test_no_text_has_fewer_tokens_than_its_bound_says(text: str, backend: Tokenizer) -> None:
    longest = bound(backend)
    assert longest is not None
    assert len(backend.encode(text, add_special_tokens=False).ids) * longest >= len(text.encode())
