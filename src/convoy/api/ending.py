"""End this process within a bound, even if its threads hang, and let no signal wait for its handler."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

# An orderly end takes a second or two; on a busy machine more.
END_S = 10.0
# Between two interruptions of the main thread, until it has run the handlers.
_AGAIN_S = 0.05
# The number of the signal that bounds the time to an end.
_BOUNDING_SIGNAL = 2


def end_within(seconds: float | None = None) -> None:
    """Exit with status 1 after ``seconds``, or `END_S`, unless the process has ended by then.

    The exit comes from a thread outside the interpreter. So it also comes if the process waits for a thread
    that never ends, or if it ignores signals. Call it only if the process is to end.
    """
    # faulthandler writes every thread's stack before it exits, and needs an open file for that.
    page = Path(os.devnull).open("w")  # noqa: SIM115
    faulthandler.dump_traceback_later(END_S if seconds is None else seconds, exit=True, file=page)


def arm_at_second(end: Callable[[], object] = end_within) -> Callable[[], None]:
    """Return a function for signal handlers, which calls ``end`` when it is called for the second time.

    It never calls ``end`` again: a handler may interrupt another one. faulthandler closes the file of an
    earlier call inside the next one. A handler that runs at that point would arm it meanwhile, and the
    interrupted call would then wait for the end of that time, with the whole process.
    """
    count = itertools.count(1)

    def arm() -> None:
        if next(count) == _BOUNDING_SIGNAL:
            end()

    return arm


def on_signals(asked: Callable[[], object]) -> None:
    """Call ``asked`` on SIGTERM and SIGINT; from the second signal on, `end_within` applies too.

    ``asked`` runs on the main thread, between any two of its instructions, so it must take no locks.
    """
    arm = arm_at_second()

    def handle(_number: int, _frame: FrameType | None) -> None:
        asked()
        arm()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def run_handlers_soon() -> None:
    """Start a thread that interrupts the main thread until the handler of a signal has run.

    Python runs handlers on the main thread alone. A signal interrupts no wait if it comes just before that
    thread enters the wait, or if the system delivers it to another thread. The handler would then wait, too,
    for as long as the main thread does. The thread learns of signals from `signal.set_wakeup_fd`. Call this
    once, on the main thread.
    """
    main = threading.get_ident()
    page, written = os.pipe()
    os.set_blocking(written, False)
    num_runs = 0

    def handled(_number: int, _frame: FrameType | None) -> None:
        nonlocal num_runs
        num_runs += 1

    def interrupt() -> None:
        while number := os.read(page, 1):
            before = num_runs
            # The interruption is a signal itself, with a byte of its own.
            while number[0] != signal.SIGURG and num_runs == before:
                signal.pthread_kill(main, signal.SIGURG)
                time.sleep(_AGAIN_S)

    # This signal does nothing in a process without a handler for it.
    signal.signal(signal.SIGURG, handled)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    threading.Thread(target=interrupt, name="signals", daemon=True).start()
