"""Shorten the start and the end of a process.

torch and transformers make a million objects that live as long as the process. A member's start took 4.1 s of
computing on a 2.5 GHz core. Of these, 0.8 s were garbage collection among those objects. At the end of the
process, garbage collection took another 1.0 s.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

_SWITCH_S = 0.001
# A fraction of a millisecond: longer than the gap between two products of a step.
_SPINS = 10_000


def switch_threads_soon() -> None:
    """Set the interval after which Python switches threads to 1 ms.

    Python's own 5 ms is longer than a device's step. A hidden state arrives in many pieces, and the receiver
    needs a turn after each of them.
    """
    sys.setswitchinterval(_SWITCH_S)


def ask_for_huge_pages() -> None:
    """Let torch ask for huge pages for large tensors, unless the operator chose otherwise.

    Two members that read weights at once on one machine then wait less for memory (`bench/METHODOLOGY.md`).
    Call this before torch is imported: torch reads the variable at its first allocation.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def wait_briefly_for_threads() -> None:
    """Let idle OpenMP threads sleep sooner, unless the operator chose otherwise.

    If other programs use the cores, spinning threads keep the awaited threads from running
    (`bench/METHODOLOGY.md`). Call this before torch is imported: the library reads the variable when it is
    loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def keep_nccl_on_loopback() -> None:
    """Make NCCL listen on loopback. Without this it takes another interface. Call it before NCCL forms a
    group.
    """
    os.environ["NCCL_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"


def settle_memory() -> None:
    """Exclude all present objects from garbage collection for good. Call it once a server is ready.

    A full collection takes 0.2 s, in any thread, while every request waits.
    """
    # Collect first, so that garbage is not frozen with the rest.
    gc.collect()
    gc.freeze()


def leave_interpreter() -> Callable[[int], NoReturn]:
    """Return a function that exits with a status, and takes no interpreter down.

    It waits for threads that are no daemons, and runs the functions of `atexit` that were registered since.
    Call this early for that reason. A daemon thread may be in native code at the end. The interpreter unwinds
    such a thread when it returns, and C++ ends the whole process with SIGABRT then: torch does so.
    """
    statuses: list[int] = []

    def leave() -> None:
        if not statuses:
            return
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            # The reader may have gone, or there was none from the start.
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(statuses[0])

    def end(status: int) -> NoReturn:
        statuses.append(status)
        sys.exit(status)

    atexit.register(leave)
    return end
