"""End this process within a bound, even if its threads hang."""

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
    """Exit with status 1 after ``seconds``, or `END_S`, unless the process has ended by then.

    The exit comes from a thread outside the interpreter. So it also comes if the process waits for a thread
    that never ends, or if it ignores signals. Call it only if the process is to end.
    """
    # faulthandler writes every thread's stack before it exits, and needs an open file for that.
    page = Path(os.devnull).open("w")  # noqa: SIM115
    faulthandler.dump_traceback_later(END_S if seconds is None else seconds, exit=True, file=page)


def on_signals(asked: Callable[[], object]) -> None:
    """Call ``asked`` on SIGTERM and SIGINT; from the second signal on, `end_within` applies too.

    ``asked`` runs on the main thread, between any two of its instructions, so it must take no locks.
    """
    count = itertools.count(1)

    def handle(_number: int, _frame: FrameType | None) -> None:
        asked()
        if next(count) > 1:
            end_within()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
