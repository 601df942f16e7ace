"""Choose for each part the first instruction set whose compiled code has the right bits on this machine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from convoy.model.kernels.native.library import NativeLibrary, native_libraries

_log = logging.getLogger(__name__)


def choose_library(
    part: str,
    holds: Callable[[NativeLibrary], bool],
    offered: Sequence[NativeLibrary] | None = None,
    *,
    may_lack: bool = False,
) -> NativeLibrary | None:
    """Return the first library whose code for ``part`` holds, or None. A warning names those that do not.

    ``offered`` None means the libraries of this machine, best first. With ``may_lack`` it is no fault that
    none holds.
    """
    refused: list[str] = []
    for library in native_libraries() if offered is None else offered:
        if holds(library):
            _tell(part, tuple(refused), library.instruction_set.name)
            return library
        refused.append(library.instruction_set.name)
    if not may_lack:
        _tell(part, tuple(refused), "")
    return None


# Kept, so that a warning appears once and not for each linear.
@functools.cache
def _tell(part: str, refused: tuple[str, ...], taken: str) -> None:
    """Warn of code that is refused. ``taken`` is the instruction set that takes its place, or empty."""
    if not refused:
        return
    instead = (
        f"that of {taken} takes its place, and longer"
        if taken
        else "torch's operators take its place, and longer"
    )
    _log.warning(
        "the compiled code of %s for %s has other bits here, and is not used: %s",
        *(part, " and ".join(refused), instead),
    )
