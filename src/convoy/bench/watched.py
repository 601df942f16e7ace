"""Read a streamed answer on a thread of its own, with the time of every piece."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from convoy.errors import ConvoyError

_NEARLY = 0.9


class Watched:
    """Read an answer from construction on. ``pieces`` yields the text as it comes; its error is kept."""

    def __init__(self, pieces: Callable[[], Iterator[str]]) -> None:
        self._pieces = pieces
        self._changed = threading.Condition()
        self._texts: list[str] = []
        self._times: list[float] = []
        self._over = False
        self.error: str | None = None
        threading.Thread(target=self._read, name="watched answer", daemon=True).start()

    @property
    def text(self) -> str:
        """Return the text so far."""
        with self._changed:
            return "".join(self._texts)

    @property
    def times_s(self) -> list[float]:
        """Return the time of each piece (``time.monotonic``)."""
        with self._changed:
            return list(self._times)

    @property
    def is_over(self) -> bool:
        """Return whether the answer has ended, complete or not."""
        with self._changed:
            return self._over

    def wait_for(self, num_pieces: int, timeout_s: float) -> bool:
        """Wait until there are ``num_pieces`` or the answer is over. Return whether there are so many."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._times) >= num_pieces, timeout_s)
            return len(self._times) >= num_pieces

    def wait(self, timeout_s: float) -> bool:
        """Wait until the answer is over. Return whether it is over and complete."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over, timeout_s) and self.error is None

    def _read(self) -> None:
        try:
            for piece in self._pieces():
                self._add(piece)
        except ConvoyError as error:
            self.error = error.message
        except BaseException as error:
            self.error = f"internal error: {type(error).__name__}"
            # This is a fault of our own, so the thread's hook must report it.
            raise
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _add(self, piece: str) -> None:
        with self._changed:
            self._texts.append(piece)
            self._times.append(time.monotonic())
            self._changed.notify_all()


def seconds_to_next(times_s: Sequence[float], lost_s: float, until_s: float = float("inf")) -> float | None:
    """Return the seconds from a loss to the end of the pause that it caused, or None if no piece followed.

    Only pauses that begin before ``until_s`` count. Pieces on their way at the time of the loss still arrive.
    So the pause of the loss is the first one that is nearly as long as the longest.
    """
    pauses = [(length, end) for start, length, end in _pauses(times_s, lost_s) if start < until_s]
    longest = max((length for length, _ in pauses), default=0.0)
    return next((end - lost_s for length, end in pauses if length >= _NEARLY * longest), None)


def seconds_to_pace(times_s: Sequence[float], lost_s: float, pause_s: float) -> float:
    """Return the seconds from a loss to the end of the last pause longer than ``pause_s``; 0 without any."""
    return max((end - lost_s for _, length, end in _pauses(times_s, lost_s) if length > pause_s), default=0.0)


def _pauses(times_s: Sequence[float], lost_s: float) -> list[tuple[float, float, float]]:
    """Return (start, length, end) of each pause that ends after the loss.

    Its part before the loss does not count.
    """
    # The first pause begins with the last piece before the loss, because the loss falls into that pause.
    after = [at for at in times_s if at > lost_s]
    starts = [max((at for at in times_s if at <= lost_s), default=lost_s), *after[:-1]]
    return [(start, end - max(start, lost_s), end) for start, end in zip(starts, after, strict=False)]
