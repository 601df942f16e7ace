"""Files of sessions: written bytes come back, and everything else is a named error."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from convoy.crypto.sealed.chunks import CHUNK_BYTES, SEALED_CHUNK_BYTES
from convoy.engine.sessions.file import SessionReader, SessionWriter
from convoy.engine.sessions.format import SavedSession, SavedState, SessionModel, encode_start
from convoy.errors import SessionError
from convoy.model.sampling.params import SamplingParams
from support.examples import examples

MODEL = SessionModel(
    name="tiny",
    digest="d" * 64,
    kernel="exact-f32",
    num_layers=2,
    num_kv_heads=2,
    head_dim=3,
    vocab_size=50,
    max_context=64,
    keeps_kv=True,
)
PARAMS = SamplingParams(temperature=0.5, seed=-3, logit_bias={4: 1.5})
STATE = SavedState(tuple(range(20)), 12, 1, PARAMS, 16)
KEY = bytes(range(32))


def unseen(_done: int, _total: int) -> None:
    pass


def kv() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng(1)
    names = [f"layers.{layer}.{half}" for layer in range(2) for half in "kv"]
    return {name: random.normal(size=(16, 2, 3)).astype(np.float32) for name in names}


def contents(state: SavedState = STATE, model: SessionModel = MODEL) -> bytes:
    data = encode_start(model, state)
    if state.positions:
        data += b"".join(half.tobytes() for half in kv().values())
    return data + hashlib.sha256(data).digest()


def changed(change: Callable[[dict[str, Any]], None], data: bytes | None = None) -> bytes:
    """Return the file with another header, and a digest that fits it."""
    whole = contents()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    body = whole[8 + length : -32] if data is None else data
    start = len(text).to_bytes(8, "little") + text + body
    return start + hashlib.sha256(start).digest()


def write(path: Path, data: bytes, key: bytes | None = None) -> None:
    with SessionWriter(path, key) as file:
        for start in range(0, len(data), 1000):
            file.write(data[start : start + 1000])


def write_half(path: Path) -> None:
    with SessionWriter(path, None) as file:
        file.write(b"half")
        raise ZeroDivisionError


def read_all(path: Path) -> bytes:
    with SessionReader(path, KEY) as reader:
        return reader.read(0, reader.size)


def load(path: Path, key: bytes | None = None, model: SessionModel = MODEL) -> SavedSession:
    with SessionReader(path, key) as reader:
        saved = SavedSession(reader, model, unseen)
        for layer in range(model.num_layers if saved.state.positions else 0):
            saved.read(layer, 0, saved.state.positions)
        return saved


@pytest.mark.parametrize("key", [None, KEY])
def test_what_was_saved_comes_back(tmp_path: Path, key: bytes | None) -> None:
    path = tmp_path / "chat"
    write(path, contents(), key)
    with SessionReader(path, key) as reader:
        saved = SavedSession(reader, MODEL, unseen)
        assert saved.state == STATE
        k, v = saved.read(1, 5, 9)
        assert np.array_equal(k, kv()["layers.1.k"][5:9])
        assert np.array_equal(v, kv()["layers.1.v"][5:9])
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_library_of_safetensors_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "chat", contents())
    found = load_file(tmp_path / "chat")
    assert found["tokens"].tolist() == list(range(20))
    assert all(np.array_equal(found[name], half) for name, half in kv().items())


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_a_sealed_file_of_any_size_is_read_at_any_place(tmp_path: Path, num_bytes: int) -> None:
    data = np.random.default_rng(2).bytes(num_bytes)
    write(tmp_path / "chat", data, KEY)
    with SessionReader(tmp_path / "chat", KEY) as reader:
        assert reader.size == num_bytes
        assert reader.read(0, num_bytes) == data
        for start in (0, 7, CHUNK_BYTES - 3, CHUNK_BYTES, num_bytes):
            end = min(num_bytes, start + 10)
            if start <= end:
                assert reader.read(start, end - start) == data[start:end]
        with pytest.raises(SessionError, match="truncated"):
            reader.read(0, num_bytes + 1)


def test_what_is_sealed_shows_nothing_of_it_and_is_never_the_same_twice(tmp_path: Path) -> None:
    write(tmp_path / "one", contents(), KEY)
    write(tmp_path / "two", contents(), KEY)
    one, two = ((tmp_path / name).read_bytes() for name in ("one", "two"))
    assert b"convoy-session" not in one
    assert b"tiny" not in one
    assert all(one[i : i + 16] != two[i : i + 16] for i in range(8, len(one) - 16, 16))


def test_a_link_at_the_place_is_replaced_and_never_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "chat").symlink_to(precious)
    write(tmp_path / "chat", contents())
    assert precious.read_text() == "mine"
    assert not (tmp_path / "chat").is_symlink()
    assert load(tmp_path / "chat").state == STATE


def test_a_save_that_fails_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "chat", contents())
    with pytest.raises(ZeroDivisionError):
        write_half(tmp_path / "chat")
    assert load(tmp_path / "chat").state == STATE
    assert [path.name for path in tmp_path.iterdir()] == ["chat"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(SessionError, match="cannot write"):
        write(tmp_path / "folder", contents())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat", "folder"]
    with pytest.raises(SessionError, match="cannot write"):
        write(tmp_path / "nowhere" / "chat", contents())


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize("key", [None, KEY])
def test_a_disk_that_is_full_keeps_no_part_of_the_prompt(tmp_path: Path, key: bytes | None) -> None:
    data = contents() * 100
    # in the midst of it, and only when the last of it is flushed
    for room in (100, len(data) - 100):
        with disk_of(room), pytest.raises(SessionError, match="cannot write"):
            write(tmp_path / "chat", data, key)
        assert list(tmp_path.iterdir()) == []


def test_a_key_that_is_none_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="a key of 5"):
        write(tmp_path / "chat", contents(), b"short")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "chat", contents(), KEY)
    with pytest.raises(SessionError, match="a key of 5"):
        load(tmp_path / "chat", b"short")


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(SessionError, match="is not a file"):
            SessionReader(path, None)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path, key: bytes | None) -> None:
    write(tmp_path / "chat", contents(), key)
    whole = (tmp_path / "chat").read_bytes()
    for length in [*range(60), *range(60, len(whole), 37), len(whole) - 1]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(SessionError):
            load(tmp_path / "cut", key)
    (tmp_path / "cut").write_bytes(whole + b"\0")
    with pytest.raises(SessionError):
        load(tmp_path / "cut", key)


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), sealed=st.booleans())
def test_any_changed_bit_is_found(tmp_path: Path, place: float, bit: int, sealed: bool) -> None:
    key = KEY if sealed else None
    write(tmp_path / "chat", contents(), key)
    data = bytearray((tmp_path / "chat").read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    (tmp_path / "chat").write_bytes(data)
    with pytest.raises(SessionError):
        load(tmp_path / "chat", key)


@settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(garbage=st.binary(max_size=400), begins=st.booleans())
def test_garbage_is_never_more_than_a_session_error(tmp_path: Path, garbage: bytes, begins: bool) -> None:
    data = len(garbage).to_bytes(8, "little") + garbage if begins else garbage
    (tmp_path / "chat").write_bytes(data)
    for key in (None, KEY):
        with pytest.raises(SessionError):
            load(tmp_path / "chat", key)


def test_chunks_that_are_moved_doubled_or_of_another_file_do_not_open(tmp_path: Path) -> None:
    data = bytes(3 * CHUNK_BYTES)
    write(tmp_path / "chat", data, KEY)
    write(tmp_path / "other", data, KEY)
    whole, other = ((tmp_path / name).read_bytes() for name in ("chat", "other"))
    head, chunks = whole[:24], [whole[24 + i * SEALED_CHUNK_BYTES :][:SEALED_CHUNK_BYTES] for i in range(3)]
    wrong = {
        "moved": [chunks[1], chunks[0], chunks[2]],
        "doubled": [chunks[0], chunks[0], chunks[2]],
        "left out": [chunks[0], chunks[2]],
        "cut at a chunk": chunks[:2],
        "last too early": [chunks[0], chunks[2], chunks[2]],
        "of another file": [chunks[0], other[24 + SEALED_CHUNK_BYTES :][:SEALED_CHUNK_BYTES], chunks[2]],
    }
    for parts in wrong.values():
        (tmp_path / "wrong").write_bytes(head + b"".join(parts))
        with pytest.raises(SessionError, match="does not open"):
            read_all(tmp_path / "wrong")


def test_another_key_and_none_and_one_too_many_are_named(tmp_path: Path) -> None:
    write(tmp_path / "sealed", contents(), KEY)
    write(tmp_path / "plain", contents())
    with pytest.raises(SessionError, match="does not open") as caught:
        load(tmp_path / "sealed", bytes(32))
    assert (caught.value.hint or "").startswith("is this the key file that it was saved with?")
    with pytest.raises(SessionError, match="is sealed"):
        load(tmp_path / "sealed")
    with pytest.raises(SessionError, match="is not sealed, and a key was given"):
        load(tmp_path / "plain", KEY)


def _set(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for name in path[:-1]:
            header = header[name]
        header[path[-1]] = to

    return change


def _params(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        params = json.loads(header["__metadata__"]["params"]) | changes
        header["__metadata__"]["params"] = json.dumps(params)

    return change


def _swap(header: dict[str, Any]) -> None:
    one, other = header["layers.0.k"], header["layers.0.v"]
    one["data_offsets"] = other["data_offsets"]


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("no session", _set("__metadata__", "format", to="pt"), "names no session"),
    ("no metadata", _set("__metadata__", to=[]), "names no session"),
    ("another version", _set("__metadata__", "version", to="1"), "version 1 of the format, expected 2"),
    ("another model", _set("__metadata__", "model_digest", to="e" * 64), "another model"),
    ("other weights", _set("__metadata__", "manifest", to="e" * 64), "other weights: expected the manifest"),
    ("a layer is missing", lambda header: header.pop("layers.1.v") and None, r"layers\.1\.v is missing"),
    ("a layer too many", lambda header: header.update({"layers.2.k": header["layers.1.k"]}), "not those of"),
    ("no tokens", lambda header: header.pop("tokens") and None, "tokens is missing"),
    ("no digest", lambda header: header.pop("sha256") and None, "sha256 is missing"),
    ("tokens of no dimension", _set("tokens", "shape", to=[]), "another dtype or shape"),
    ("a digest of no dimension", _set("sha256", "shape", to=[]), "another dtype or shape"),
    ("no kernel", lambda header: header["__metadata__"].pop("kernel") and None, "names no kernel"),
    ("a kernel that is no name", _set("__metadata__", "kernel", to=["exact-f32"]), "names no kernel"),
    ("half the precision", _set("layers.0.k", "dtype", to="F16"), "another dtype"),
    ("a dtype that is none", _set("layers.0.k", "dtype", to={"a": 1}), "another dtype"),
    ("other heads", _set("layers.0.k", "shape", to=[16, 3, 2]), "another dtype or shape"),
    ("fewer dimensions", _set("layers.0.k", "shape", to=[96]), "another dtype or shape"),
    ("a negative size", _set("layers.0.k", "shape", to=[-16, 2, 3]), "no shape"),
    ("a size that is true", _set("layers.0.k", "shape", to=[True, 2, 3]), "no shape"),
    ("an enormous size", _set("layers.0.k", "shape", to=[2**60, 2, 3]), "no shape"),
    ("more than the context", _set("tokens", "shape", to=[65]), "more than its context"),
    ("less data than its shape", _set("tokens", "data_offsets", to=[0, 152]), "another size"),
    ("ends before it starts", _set("tokens", "data_offsets", to=[160, 0]), "no shape or place"),
    ("two in one place", _swap, "do not fill"),
    ("no place", _set("tokens", to={"dtype": "I64", "shape": [20]}), "no dtype, shape or place"),
    ("not an object", _set("tokens", to=7), "no dtype, shape or place"),
    ("a prompt longer than all", _set("__metadata__", "num_prompt", to="21"), "sampling state"),
    ("a choice that is none", _set("__metadata__", "choice", to="first"), "sampling state"),
    ("no parameters", _set("__metadata__", "params", to="[]"), "sampling state"),
    ("too hot", _params(temperature=9), "sampling state"),
    ("hotter than a float", _params(temperature=10**400), "sampling state"),
    ("a choice without end", _set("__metadata__", "choice", to=float("inf")), "sampling state"),
    ("an unknown parameter", _params(best_of=2), "sampling state"),
    ("a bias of no token", _params(logit_bias=[[50, 1.0]]), "sampling state"),
    ("a bias of no shape", _params(logit_bias=7), "sampling state"),
    ("parameters deep down", _set("__metadata__", "params", to="[" * 100_000), "sampling state"),
]


@pytest.mark.parametrize(("change", "error"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_header_of_a_session_that_lies_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], error: str
) -> None:
    (tmp_path / "chat").write_bytes(changed(change))
    with pytest.raises(SessionError, match=error):
        load(tmp_path / "chat")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.integers(0, 1000), value=JSON, leaves=st.booleans())
def test_any_value_anywhere_in_a_header_is_right_or_refused(
    tmp_path: Path, place: int, value: Any, leaves: bool
) -> None:
    def change(header: dict[str, Any]) -> None:
        places = [(header, name) for name in header]
        places += [(inner, name) for inner in header.values() for name in inner]
        holder, name = places[place % len(places)]
        if leaves:
            del holder[name]
        else:
            holder[name] = value

    (tmp_path / "chat").write_bytes(changed(change))
    with suppress(SessionError):
        load(tmp_path / "chat")


@pytest.mark.parametrize("claimed", [0, 1, 2**20 + 1, 2**40, 2**64 - 1])
def test_the_length_of_a_header_is_bounded_before_it_is_read(tmp_path: Path, claimed: int) -> None:
    (tmp_path / "chat").write_bytes(claimed.to_bytes(8, "little") + bytes(2**20 + 100))
    with pytest.raises(SessionError, match="a header of"):
        load(tmp_path / "chat")


def test_json_that_is_deep_or_no_json_is_refused(tmp_path: Path) -> None:
    for text in (b"[" * 200_000, b"{", b'{"a":NaN', b"\xff" * 9, b"[1]" + b" " * 9):
        (tmp_path / "chat").write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(SessionError):
            load(tmp_path / "chat")


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for token in (50, -1, 2**40):
        write(tmp_path / "chat", contents(replace(STATE, tokens=(*range(19), token))))
        with pytest.raises(SessionError, match="outside the vocabulary of 50"):
            load(tmp_path / "chat")


def test_more_positions_than_tokens_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "chat", contents(replace(STATE, tokens=(1, 2, 3), num_prompt=1)))
    with pytest.raises(SessionError, match="K/V of 16 positions, and 3 tokens"):
        load(tmp_path / "chat")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, number: float) -> None:
    start = encode_start(MODEL, STATE)
    halves = kv()
    halves["layers.1.k"][15, 1, 2] = number
    data = start + b"".join(half.tobytes() for half in halves.values())
    write(tmp_path / "chat", data + hashlib.sha256(data).digest())
    with pytest.raises(SessionError, match=r"layers\.1\.k has a number that is not finite"):
        load(tmp_path / "chat")


def test_a_session_without_kv_or_tokens_comes_back(tmp_path: Path) -> None:
    for state in (replace(STATE, positions=0), SavedState((), 0, 0, PARAMS, 0)):
        write(tmp_path / "chat", contents(state))
        assert load(tmp_path / "chat").state == state


def test_no_error_tells_a_token_or_a_number_of_the_session(tmp_path: Path) -> None:
    write(tmp_path / "chat", contents(replace(STATE, tokens=(*range(19), 4242))))
    with pytest.raises(SessionError) as caught:
        load(tmp_path / "chat")
    assert "4242" not in str(caught.value)
