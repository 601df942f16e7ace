"""The envelope of a private key: vectors, a computation from docs/protocol.md, and what must not open."""

from __future__ import annotations

import hashlib
import json
import stat
import unicodedata
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.crypto.identity import OperatorKey, has_passphrase, verify
from convoy.crypto.key_envelope import ENVELOPE_BYTES, ScryptCost, open_key, seal_key
from convoy.errors import IdentityError

VECTOR = json.loads(
    (Path(__file__).parents[1] / "vectors" / "key_envelope_v1.json").read_text(encoding="utf-8")
)
PRIVATE = bytes.fromhex(VECTOR["private_key"])
SALT, NONCE = bytes.fromhex(VECTOR["salt"]), bytes.fromhex(VECTOR["nonce"])
CHEAP = ScryptCost(4, 8, 1)
CHEAP_ENVELOPE = seal_key(PRIVATE, "word", salt=SALT, nonce=NONCE, cost=CHEAP)


@pytest.mark.parametrize("entry", VECTOR["envelopes"], ids=["ascii", "decomposed"])
def test_we_seal_and_open_what_the_vector_says(entry: dict[str, str]) -> None:
    envelope = bytes.fromhex(entry["envelope"])
    assert seal_key(PRIVATE, entry["passphrase"], salt=SALT, nonce=NONCE) == envelope
    assert open_key(envelope, unicodedata.normalize("NFD", entry["passphrase"])) == PRIVATE


def test_an_independent_computation_agrees() -> None:
    # From the page alone: scrypt of hashlib, and the offsets of its table.
    entry = VECTOR["envelopes"][1]
    envelope = bytes.fromhex(entry["envelope"])
    header, sealed = envelope[:40], envelope[40:]
    assert header == b"CNVYOKEY" + bytes([1, 17, 8, 1]) + SALT + NONCE
    word = unicodedata.normalize("NFC", entry["passphrase"]).encode()
    key = hashlib.scrypt(word, salt=SALT, n=2**17, r=8, p=1, dklen=32, maxmem=2**28)
    assert AESGCM(key).decrypt(NONCE, sealed, header) == PRIVATE


@given(st.integers(0, ENVELOPE_BYTES * 8 - 1))
@settings(deadline=None)
def test_a_flipped_bit_anywhere_does_not_open(bit: int) -> None:
    changed = bytearray(CHEAP_ENVELOPE)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IdentityError):
        open_key(bytes(changed), "word", cost=CHEAP)


@given(st.binary(max_size=200))
def test_garbage_is_an_identity_error_and_nothing_else(garbage: bytes) -> None:
    for data in (garbage, CHEAP_ENVELOPE[:40] + garbage):
        if data != CHEAP_ENVELOPE:
            with pytest.raises(IdentityError):
                open_key(data, "word", cost=CHEAP)


@pytest.mark.parametrize(
    ("log2_n", "r", "p"), [(4, 8, 1), (30, 8, 1), (255, 255, 255), (17, 255, 1), (17, 8, 2), (0, 0, 0)]
)
def test_other_parameters_are_refused_before_scrypt_runs(
    monkeypatch: pytest.MonkeyPatch, log2_n: int, r: int, p: int
) -> None:
    def never(*_args: object, **_options: object) -> None:
        raise AssertionError("scrypt ran")

    monkeypatch.setattr("convoy.crypto.key_envelope.Scrypt", never)
    changed = CHEAP_ENVELOPE[:9] + bytes([log2_n, r, p]) + CHEAP_ENVELOPE[12:]
    with pytest.raises(IdentityError, match=f"N=2\\^{log2_n}, r={r}, p={p}, expected N=2\\^17, r=8, p=1"):
        open_key(changed, "word")


def test_another_version_is_named_with_ours() -> None:
    changed = CHEAP_ENVELOPE[:8] + b"\x02" + CHEAP_ENVELOPE[9:]
    with pytest.raises(IdentityError, match="version 2, expected 1"):
        open_key(changed, "word", cost=CHEAP)


@pytest.mark.parametrize("word", ["", "x" * 1025, "\ud800"])
def test_a_passphrase_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(IdentityError, match="passphrase"):
        seal_key(PRIVATE, word, salt=SALT, nonce=NONCE, cost=CHEAP)


def test_an_operator_key_with_a_passphrase_comes_back_with_it_alone(tmp_path: Path) -> None:
    key = OperatorKey.generate()
    key.save(tmp_path / "op", "word", cost=CHEAP)
    loaded = OperatorKey.load(tmp_path / "op", lambda: "word", cost=CHEAP)
    verify(key.public_key, loaded.sign(b"text"), b"text")
    file = tmp_path / "op" / "operator.key"
    assert b"PRIVATE" not in file.read_bytes()
    for word in ("Word", "word ", ""):
        with pytest.raises(IdentityError) as caught:
            OperatorKey.load(tmp_path / "op", lambda word=word: word, cost=CHEAP)  # type: ignore[misc]
        assert str(file) in caught.value.message
    with pytest.raises(IdentityError, match="has a passphrase, and none was given"):
        OperatorKey.load(tmp_path / "op", cost=CHEAP)


def test_a_plain_operator_key_asks_for_no_passphrase(tmp_path: Path) -> None:
    def never() -> str:
        raise AssertionError("it was asked for")

    OperatorKey.generate().save(tmp_path / "op")
    assert not has_passphrase(tmp_path / "op")
    OperatorKey.load(tmp_path / "op", never)


def test_a_passphrase_is_set_changed_and_removed_without_another_key(tmp_path: Path) -> None:
    key = OperatorKey.generate()
    key.save(tmp_path / "op")
    for word in ("first", "second", None):
        key.replace(tmp_path / "op", word, cost=CHEAP)
        assert has_passphrase(tmp_path / "op") is (word is not None)
        key = OperatorKey.load(tmp_path / "op", lambda word=word: word, cost=CHEAP)  # type: ignore[misc]
    assert [file.name for file in (tmp_path / "op").iterdir()] == ["operator.key"]
    assert stat.S_IMODE((tmp_path / "op" / "operator.key").stat().st_mode) == 0o600


def test_two_files_of_one_key_and_passphrase_share_neither_salt_nor_nonce(tmp_path: Path) -> None:
    key = OperatorKey.generate()
    for name in ("one", "two"):
        key.save(tmp_path / name, "word", cost=CHEAP)
    one, two = ((tmp_path / name / "operator.key").read_bytes() for name in ("one", "two"))
    assert one[12:28] != two[12:28]
    assert one[28:40] != two[28:40]
