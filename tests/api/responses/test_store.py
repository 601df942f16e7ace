"""The store's bounds: bytes, age and keys."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from convoy.api.refusals import UnknownResponse
from convoy.api.responses.store import ResponseStore
from convoy.model.text.conversation import ToolCall, Turn

ANN, BOB = b"ann", b"bob"
TURNS = (Turn("user", "hi"), Turn("assistant", "ho", "hm", (ToolCall("call_1", "read", "{}"),)))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def holds(store: ResponseStore, owner: bytes, response_id: str) -> bool:
    try:
        store.body(owner, response_id)
    except UnknownResponse:
        return False
    return True


def test_a_response_comes_back_with_its_conversation() -> None:
    store = ResponseStore()
    store.keep(ANN, ANN, "resp_1", b'{"id":"resp_1"}', TURNS)
    assert store.body(ANN, "resp_1") == b'{"id":"resp_1"}'
    assert store.turns(ANN, "resp_1") == TURNS


def test_another_key_cannot_tell_a_response_from_none() -> None:
    store = ResponseStore()
    store.keep(ANN, ANN, "resp_1", b"{}", TURNS)
    texts = []
    for response_id in ("resp_1", "resp_2"):
        for ask in (store.body, store.turns, store.delete):
            with pytest.raises(UnknownResponse) as caught:
                ask(BOB, response_id)
            texts.append(str(caught.value))
    assert len(set(texts)) == 1
    assert holds(store, ANN, "resp_1")


def test_a_deleted_response_is_gone_with_its_bytes() -> None:
    store = ResponseStore()
    store.keep(ANN, ANN, "resp_1", b"{}", TURNS)
    store.delete(ANN, "resp_1")
    assert not holds(store, ANN, "resp_1")
    assert store.num_bytes == 0


def test_a_response_is_gone_after_its_age() -> None:
    clock = Clock()
    store = ResponseStore(max_age_s=3600.0, clock=clock)
    store.keep(ANN, ANN, "resp_1", b"{}", TURNS)
    clock.now_s += 1800.0
    store.keep(ANN, ANN, "resp_2", b"{}", TURNS)
    clock.now_s += 1799.0
    assert holds(store, ANN, "resp_1")
    clock.now_s += 1.0
    assert not holds(store, ANN, "resp_1")
    assert holds(store, ANN, "resp_2")


def test_the_bytes_are_bounded_and_the_oldest_goes_first() -> None:
    store = ResponseStore(max_bytes=20_000)
    for number in range(50):
        store.keep(ANN, ANN, f"resp_{number}", b"x" * 4000, ())
        assert store.num_bytes <= 20_000
    held = [number for number in range(50) if holds(store, ANN, f"resp_{number}")]
    assert held == [47, 48, 49]


def test_the_bytes_of_the_conversation_count() -> None:
    store = ResponseStore(max_bytes=20_000)
    store.keep(ANN, ANN, "resp_1", b"{}", (Turn("user", "x" * 10_000),))
    assert store.num_bytes > 10_000


def test_one_response_over_the_bound_is_not_kept_and_pushes_none_out() -> None:
    store = ResponseStore(max_bytes=20_000)
    store.keep(ANN, ANN, "resp_1", b"{}", TURNS)
    store.keep(ANN, ANN, "resp_2", b"x" * 20_000, TURNS)
    assert holds(store, ANN, "resp_1")
    assert not holds(store, ANN, "resp_2")


def test_a_key_that_fills_the_store_pushes_out_its_own_responses_alone() -> None:
    store = ResponseStore(max_bytes=20_000)
    store.keep(BOB, BOB, "resp_bob", b"x" * 4000, ())
    for number in range(50):
        store.keep(ANN, ANN, f"resp_{number}", b"x" * 4000, ())
    assert holds(store, BOB, "resp_bob")


def test_a_key_under_many_owners_pushes_out_its_own_responses_alone() -> None:
    store = ResponseStore(max_bytes=20_000)
    for number in range(3):
        store.keep(BOB, BOB, f"resp_bob_{number}", b"x" * 1000, ())
    for number in range(50):
        store.keep(ANN, b"ann with salt %d" % number, f"resp_{number}", b"x" * 1000, ())
    assert all(holds(store, BOB, f"resp_bob_{number}") for number in range(3))
    assert not holds(store, ANN, "resp_49")
    assert holds(store, b"ann with salt 49", "resp_49")


def test_many_threads_leave_the_count_of_bytes_right() -> None:
    store = ResponseStore(max_bytes=100_000)

    def work(owner: bytes) -> None:
        for number in range(200):
            name = f"resp_{owner.decode()}_{number}"
            store.keep(owner, owner, name, b"x" * 1000, ())
            # Another thread may have pushed it out already.
            with suppress(UnknownResponse):
                if number % 3 == 0:
                    store.delete(owner, name)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in (ANN, BOB, b"cid", b"dan")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.num_bytes <= 100_000
    for owner in (ANN, BOB, b"cid", b"dan"):
        for number in range(200):
            name = f"resp_{owner.decode()}_{number}"
            if holds(store, owner, name):
                store.delete(owner, name)
    assert store.num_bytes == 0
