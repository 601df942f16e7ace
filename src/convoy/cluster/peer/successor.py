"""A dial to the next stage of the ring, which its owner stops waiting for as soon as the plan is over.

A dial to an address that does not answer takes its whole time limit. A peer that waited for it would read
its next plan late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from convoy.errors import StepError
from convoy.transport.link.link import Link


class SuccessorDial:
    """Dial at once on a thread of its own. One thread calls `wait`; any thread may call `abandon`."""

    def __init__(self, dial: Callable[[], Link], name: str) -> None:
        self._dial = dial
        self._name = name
        self._changed = threading.Condition()
        self._outcome: Link | BaseException | None = None
        self._why = ""
        threading.Thread(target=self._run, name=f"dial {name}", daemon=True).start()

    def wait(self) -> Link:
        """Wait for the link and return it. Raises the error of the dial, or `StepError` after `abandon`."""
        with self._changed:
            self._changed.wait_for(lambda: self._why or self._outcome is not None)
            outcome, why = self._outcome, self._why
            # The caller that took the link also ends it.
            self._outcome = None
        if why:
            self._end(outcome)
            raise StepError(f"{self._name} is not dialled any more: {why}")
        assert outcome is not None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def abandon(self, why: str) -> None:
        """Give the dial up. A link that was handed out already stays open."""
        with self._changed:
            self._why = self._why or why
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            outcome: Link | BaseException = self._dial()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            outcome = error
        with self._changed:
            abandoned = bool(self._why)
            if not abandoned:
                self._outcome = outcome
                self._changed.notify_all()
        if abandoned:
            self._end(outcome)

    def _end(self, outcome: Link | BaseException | None) -> None:
        if isinstance(outcome, Link):
            outcome.dismiss("the plan is over")
