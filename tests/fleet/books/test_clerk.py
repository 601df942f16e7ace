from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, text

from convoy.api.refusals import NoBalance
from convoy.fleet.books.clerk import Clerk
from convoy.fleet.books.ledger import AccountUsage, Bill, Hold, Ledger
from convoy.fleet.books.store import Store
from support.waiting import wait_until

HOLD = Hold("r0", "ann", "demo", 10, b"h" * 32)
BILL = Bill("p1", 1, 1, 4)
T = TypeVar("T")


@pytest.fixture
def ledger(store: Store) -> Ledger:
    made = Ledger(store, "here")
    for name in ("ann", "bob"):
        made.open_account(name)
        made.credit(name, 1000)
    return made


def run(store: Store, ledger: Ledger, work: Callable[[Clerk], Coroutine[Any, Any, T]]) -> T:
    with closing(Clerk(store, ledger)) as clerk:
        return asyncio.run(work(clerk))


@contextmanager
def transactions(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield counts of transactions and of waits for the disk."""
    counts = [0, 0]
    write, fsync = store.write, os.fsync

    def counted(**how: bool) -> Any:
        counts[0] += 1
        return write(**how)

    def synced(number: int) -> None:
        counts[1] += 1
        fsync(number)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", counted)
        patch.setattr(os, "fsync", synced)
        yield counts


def test_what_is_asked_at_once_is_one_transaction_and_one_wait_for_the_disk(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.is_postgres:
        pytest.skip("PostgreSQL has writers beside each other")
    names = [f"r{number}" for number in range(40)]

    async def work(clerk: Clerk) -> None:
        with transactions(store, monkeypatch) as counts:
            await asyncio.gather(*(clerk.reserve(replace(HOLD, request_id=name)) for name in names))
            assert counts[0] <= 3  # the first alone, while the others came
            assert counts[1] == 0
            await asyncio.gather(*(clerk.settle(name, BILL) for name in names))
            assert counts[0] <= 6
            assert 1 <= counts[1] <= 4

    run(store, ledger, work)
    assert ledger.usage() == [AccountUsage("ann", "demo", 40, 40, 40, 160)]
    assert ledger.balance("ann") == 1000 - 160
    assert ledger.check() == []


def test_one_that_is_refused_or_broken_costs_those_beside_it_nothing(store: Store, ledger: Ledger) -> None:
    async def work(clerk: Clerk) -> list[BaseException | None]:
        asked = [replace(HOLD, request_id=f"r{number}") for number in range(6)]
        asked[2] = replace(asked[2], amount_micro=5000)
        asked[4] = replace(asked[4], request_id="r3")  # twice: the database itself refuses it, half written
        asked[5] = replace(asked[5], account="bob")
        return await asyncio.gather(*(clerk.reserve(hold) for hold in asked), return_exceptions=True)

    found = run(store, ledger, work)
    assert found.count(None) == 4
    assert isinstance(found[2], NoBalance)
    assert sum(isinstance(one, BaseException) for one in found) == 2
    assert (ledger.balance("ann"), ledger.balance("bob")) == (970, 990)
    assert ledger.check() == []


def test_what_was_asked_is_done_where_whoever_asked_is_gone(store: Store, ledger: Ledger) -> None:
    """Otherwise a client that hangs up while its request is settled would have it for nothing."""
    ledger.reserve(HOLD)
    go_on = threading.Event()

    async def work(clerk: Clerk) -> None:
        def wait(_: Connection) -> None:
            go_on.wait(30)

        held = asyncio.ensure_future(clerk.change(wait, survives_power=False))
        await asyncio.sleep(0)
        settling = asyncio.ensure_future(clerk.settle("r0", BILL))
        await asyncio.sleep(0)
        settling.cancel()
        go_on.set()
        await held

    run(store, ledger, work)
    wait_until(lambda: ledger.balance("ann") == 996)


def test_a_database_that_fails_says_so_to_each_and_the_clerk_goes_on(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.is_postgres:
        pytest.skip("each is on its own there")

    def broken(db: Connection, _: Hold) -> None:
        db.execute(text("SELECT * FROM no_such_table"))

    async def work(clerk: Clerk) -> list[BaseException | None]:
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "reserve_in", broken)
            found = await asyncio.gather(*(clerk.reserve(HOLD) for _ in range(3)), return_exceptions=True)
        await clerk.reserve(HOLD)
        return found

    found = run(store, ledger, work)
    assert all(isinstance(one, BaseException) for one in found)
    assert ledger.balance("ann") == 990
