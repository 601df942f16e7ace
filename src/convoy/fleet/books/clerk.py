"""Write the ledger for an event loop: simultaneous changes share one transaction, and one wait for the disk.

SQLite has one writer at a time. So one thread writes here for all requests: the jobs that came while it wrote
are its next transaction. Another thread waits for the disk, for all jobs that settled while it waited last,
and meanwhile the first one writes on. PostgreSQL has writers beside each other, and there each job is on its
own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection

from convoy.errors import ConvoyError
from convoy.fleet.books.ledger import Bill, Hold, Ledger
from convoy.fleet.books.store import Store

T = TypeVar("T")

# The most jobs in one transaction. Each of them waits for all of them.
_MAX_TOGETHER = 128
_END_S = 30.0


@dataclass(slots=True)
class _Job:
    """Hold one change. ``work`` raises `ConvoyError` before it writes anything, or not at all."""

    work: Callable[[Connection], Any]
    survives_power: bool
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def tell(self) -> None:
        """Set the future's result, on the loop's thread."""
        # The caller was cancelled.
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


class Clerk:
    """Write changes for many requests. A change is made also if its caller is gone before.

    `close` ends the threads.
    """

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._to_write: SimpleQueue[_Job | None] = SimpleQueue()
        self._to_sync: SimpleQueue[list[_Job] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def reserve(self, hold: Hold) -> None:
        """Reserve as `Ledger.reserve`."""
        await self.change(lambda db: self._ledger.reserve_in(db, hold), survives_power=False)

    async def settle(self, request_id: str, bill: Bill) -> int:
        """Settle as `Ledger.settle`: the charge outlives this process and a loss of power."""
        return await self.change(lambda db: self._ledger.settle_in(db, request_id, bill), survives_power=True)

    async def release(self, request_id: str) -> None:
        """Release as `Ledger.release`."""
        await self.change(lambda db: self._ledger.release_in(db, request_id), survives_power=False)

    async def undelivered(self, request_id: str) -> None:
        """Note as `Ledger.undelivered`."""
        await self.change(lambda db: self._ledger.undelivered_in(db, request_id), survives_power=False)

    def close(self) -> None:
        """End the threads once all jobs are done."""
        if self._threads:
            self._to_write.put(None)
            for thread in self._threads:
                thread.join(_END_S)

    async def change(self, work: Callable[[Connection], T], *, survives_power: bool) -> T:
        """Return the result of ``work``, run in a transaction that other changes may share."""
        if self._store.is_postgres:
            loop = asyncio.get_running_loop()
            return await asyncio.shield(loop.run_in_executor(None, self._alone, work, survives_power))
        if not self._threads:
            for name, run in (("ledger", self._write), ("ledger disk", self._sync)):
                self._threads.append(threading.Thread(target=run, name=name, daemon=True))
                self._threads[-1].start()
        loop = asyncio.get_running_loop()
        job = _Job(work, survives_power, loop, loop.create_future())
        self._to_write.put(job)
        result: T = await job.done
        return result

    def _alone(self, work: Callable[[Connection], T], survives_power: bool) -> T:
        with self._store.write(survives_power=survives_power) as db:
            return work(db)

    # The threads.

    def _write(self) -> None:
        while (jobs := _together(self._to_write)) is not None:
            try:
                self._write_all(jobs)
            except BaseException:  # noqa: BLE001 - one of them, or the database: each is told its own
                # One failing job has undone the transaction of all.
                # Each one alone then gets its own result or error.
                self._write_each(jobs)
            # A charge is reported only once it is on the disk. Other changes need not wait for that.
            waits = [job for job in jobs if job.survives_power and job.error is None]
            _tell([job for job in jobs if not (job.survives_power and job.error is None)])
            if waits:
                self._to_sync.put(waits)
        self._to_sync.put(None)

    def _write_all(self, jobs: list[_Job]) -> None:
        with self._store.write(survives_power=False) as db:
            for job in jobs:
                try:
                    job.result = job.work(db)
                except ConvoyError as error:
                    job.error = error

    def _write_each(self, jobs: list[_Job]) -> None:
        for job in jobs:
            job.error = None
            try:
                self._write_all([job])
            except BaseException as error:  # noqa: BLE001 - told to the caller
                job.error = error

    def _sync(self) -> None:
        while (found := _together(self._to_sync)) is not None:
            jobs = [job for jobs in found for job in jobs]
            try:
                self._store.sync()
            except OSError as error:
                for job in jobs:
                    job.error = error
            _tell(jobs)


def _together(queue: SimpleQueue[Any]) -> list[Any] | None:
    """Return all queued items, once there is one; None at the end."""
    found = queue.get()
    if found is None:
        return None
    together = [found]
    while len(together) < _MAX_TOGETHER:
        try:
            found = queue.get_nowait()
        except Empty:
            break
        if found is None:
            # Put the end back behind the items that came before it.
            queue.put(None)
            break
        together.append(found)
    return together


def _tell(jobs: list[_Job]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, told in by_loop.items():
        try:
            loop.call_soon_threadsafe(_tell_all, told)
        except RuntimeError:
            # The loop is closed and the caller gone, but the change is made.
            continue


def _tell_all(jobs: list[_Job]) -> None:
    for job in jobs:
        job.tell()
