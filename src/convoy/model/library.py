"""Allow one thread at a time in `transformers` while it imports or loads.

Its modules import each other in cycles, on first use, so two threads would see each other's half-imported
modules. A load also patches the library's own modules while it runs.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIBRARY = threading.RLock()
# exceptions that the library raises for unforeseen values: it does not validate most of a config.json
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
# other exceptions' texts say little without the type
_DESCRIBED = (OSError, RuntimeError, ValueError)
_MAX_REASON = 300


def reason(error: Exception) -> str:
    """Describe a library's exception as part of one line."""
    text = " ".join(str(error).split())[:_MAX_REASON]
    return text if isinstance(error, _DESCRIBED) and text else f"{type(error).__name__}: {text}".rstrip(": ")


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Disable the garbage collector around large imports, and freeze all objects that exist afterwards.

    The former saves a fifth of the imports' time. The latter keeps a full collection, which takes a third of
    a second, from occurring between two tokens.
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
    """Hold `LIBRARY` around imports that bring in `transformers`' own modules, which take seconds once."""
    with LIBRARY:
        if "transformers.modeling_utils" in sys.modules:
            yield
            return
        with collector_at_rest():
            yield


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the library's output, as its errors arrive as exceptions."""
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


@contextmanager
def heavy_rooms(say: Callable[[str], None] = lambda _text: None) -> Iterator[None]:
    """Import heavy packages in the block, without garbage collection. ``say`` is told if torch is yet to
    load.
    """
    if "torch" not in sys.modules:
        say("loading PyTorch ...")
    with collector_at_rest():
        yield
