"""One thread at a time in `transformers`: where it imports, and while it loads.

Its modules import each other in rings, on first use; two threads at that see each other's half-made ones. And
a load patches its own modules meanwhile.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LIBRARY = threading.RLock()
# What it raises for a value that it did not foresee: it takes most of a config.json for what it should be
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
FOREIGN = "config.json is of another model, or was changed"
_DESCRIBED = (OSError, RuntimeError, ValueError)  # others' texts say little without their type
_MAX_REASON = 300


def reason(error: Exception) -> str:
    """What the library raised, as part of one line."""
    text = " ".join(str(error).split())[:_MAX_REASON]
    return text if isinstance(error, _DESCRIBED) and text else f"{type(error).__name__}: {text}".rstrip(": ")


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Around large imports: no garbage is looked for meanwhile, nor ever again among what is there then.

    The former is a fifth of their time; the latter keeps a full collection, a third of a second, from between
    two tokens.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """`LIBRARY` around an import of modules that bring `transformers`' own, which take seconds once."""
    with LIBRARY:
        if "transformers.modeling_utils" in sys.modules:
            yield
            return
        with collector_at_rest():
            yield


@contextmanager
def quiet() -> Iterator[None]:
    """No output of the library's: what is wrong comes as an error."""
    import transformers

    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()  # type: ignore[no-untyped-call]
    log.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()  # type: ignore[no-untyped-call]
