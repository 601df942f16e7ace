"""A short start, and a short end.

torch and transformers make a million objects that live as long as the process. Of the 4.1 s of computing
that a member's start took on a 2.5 GHz core, 0.8 s went by looking for garbage among them, and 1.0 s more at
its end.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from convoy.model.library import collector_at_rest

_SWITCH_S = 0.001
_SPINS = 10_000  # a fraction of a millisecond: longer than the gap between two products of a step


def switch_threads_soon() -> None:
    """A thread that has something to send or that came waits for no other's Python for longer than this.

    Python's own 5 ms is longer than a device takes for a step, and a hidden state is received in many pieces,
    after each of which the receiver has to have its turn.
    """
    sys.setswitchinterval(_SWITCH_S)


def ask_for_huge_pages() -> None:
    """Have torch ask for huge pages under what is large, unless the operator says otherwise.

    Two members that read weights at once on one machine wait less for memory (`bench/METHODOLOGY.md`). torch
    looks when it first allocates, so this comes before it is imported.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def wait_briefly_for_threads() -> None:
    """Have threads of OpenMP that wait for work sleep sooner, unless the operator says otherwise.

    Where other programs use the cores, spinning threads keep those from running for which they wait
    (`bench/METHODOLOGY.md`). The library reads this when it is loaded, so it comes before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def keep_nccl_on_loopback() -> None:
    """Its listener, which takes another interface unless it is told. Before a group of it is made."""
    os.environ["NCCL_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"


def settle_memory() -> None:
    """What a server is made of by now is left out of collections for good.

    A full one takes 0.2 s, in whichever thread, while every request waits.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def heavy_rooms(say: Callable[[str], None] = lambda _text: None) -> Iterator[None]:
    """Around their import; ``say`` is told what takes so long, if it is still to come."""
    if "torch" not in sys.modules:
        say("loading PyTorch ...")
    with collector_at_rest():
        yield
