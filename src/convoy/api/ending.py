"""The last resort: an end of this process that no thread can hold up."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

# An orderly end takes a second or two; on a busy machine more.
END_S = 10.0


def end_within(seconds: float | None = None) -> None:
    """Have this process exit with status 1 after ``seconds``, or `END_S`, unless it has ended by then.

    The exit comes from a thread outside the interpreter, so it also comes where a thread that never ends is
    waited for, or where signals are ignored. Call it only where the process is to end.
    """
    # What is written says where each thread stands; the file stays open for it.
    page = Path(os.devnull).open("w")  # noqa: SIM115
    faulthandler.dump_traceback_later(END_S if seconds is None else seconds, exit=True, file=page)


def on_signals(asked: Callable[[], object]) -> None:
    """Have SIGTERM and SIGINT call ``asked``; from the second signal on, `end_within` applies too.

    ``asked`` runs on the main thread, between any two of its instructions: it takes no locks.
    """
    count = itertools.count(1)

    def handle(_number: int, _frame: FrameType | None) -> None:
        asked()
        if next(count) > 1:
            end_within()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
