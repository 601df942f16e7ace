"""The findings of an examination: a line in plain words, and the command that mends a fault."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from convoy.errors import ConvoyError

_log = logging.getLogger(__name__)

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold one finding. ``what`` is a fact; ``mend`` a command or a sentence, None if nothing is wrong."""

    level: Level
    what: str
    mend: str | None = None


def ok(what: str) -> Finding:
    return Finding("ok", what)


def warn(what: str, mend: str | None = None) -> Finding:
    """Return a finding about something that works, but not as it should, or not for long."""
    return Finding("warn", what, mend)


def fail(what: str, mend: str | None = None) -> Finding:
    """Return a finding because of which a member cannot run, or cannot be reached."""
    return Finding("fail", what, mend)


Look = Callable[[], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """Name one subject and its examination. ``wait`` describes one that takes more than a moment."""

    name: str
    look: Look
    wait: str | None = None


def examine(check: Check) -> list[Finding]:
    """Return the findings of a check.

    A check that fails itself is a finding too, so that the others still run.
    """
    try:
        return list(check.look())
    except ConvoyError as error:
        return [fail(error.message, error.hint)]
    except OSError as error:
        return [fail(f"the system says: {(error.strerror or type(error).__name__).lower()}")]
    except Exception as error:  # noqa: BLE001 - reported as a finding, with the traceback in the log
        _log.exception("the check of %s failed", check.name)
        return [fail(f"this check failed itself: {type(error).__name__}", "report it: a fault of Convoy")]


def at_once(timeout_s: float, looks: Sequence[tuple[Look, Finding]]) -> list[Finding]:
    """Run all of them at the same time, each on a thread, and return their findings.

    A look that is not done in time counts as its ``late`` finding. Name look-ups have no deadline, so a
    thread may outlive the call.
    """
    deadline_s = time.monotonic() + timeout_s
    answers = [_start(look) for look, _ in looks]
    found: list[Finding] = []
    for answer, (_, late) in zip(answers, looks, strict=True):
        try:
            found += answer.get(timeout=max(0.001, deadline_s - time.monotonic()))
        except queue.Empty:
            found.append(late)
    return found


def _start(look: Look) -> queue.SimpleQueue[list[Finding]]:
    answer: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()
    check = Check("one of several", look)
    threading.Thread(target=lambda: answer.put(examine(check)), daemon=True).start()
    return answer
