"""A short start, and a short end.

torch and transformers make a million objects that live as long as the process. Of the 4.1 s of computing
that a member's start took on a 2.5 GHz core, 0.8 s went by looking for garbage among them, and 1.0 s more at
its end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Around large imports: nothing is looked for meanwhile, nor ever again among what is there then.

    The latter also keeps a full collection, a third of a second, from between two tokens.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
