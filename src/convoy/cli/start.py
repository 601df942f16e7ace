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


def ask_for_huge_pages() -> None:
    """Have torch ask for huge pages under what is large, unless the operator says otherwise.

    Two members that read weights at once on one machine wait less for memory (`bench/METHODOLOGY.md`). torch
    looks when it first allocates, so this comes before it is imported.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def collector_at_rest(say: Callable[[str], None] = lambda _text: None) -> Iterator[None]:
    """Around large imports: nothing is looked for meanwhile, nor ever again among what is there then.

    The latter also keeps a full collection, a third of a second, from between two tokens. ``say`` is told
    what takes so long, if it is still to come.
    """
    if "torch" not in sys.modules:
        say("loading PyTorch ...")
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
