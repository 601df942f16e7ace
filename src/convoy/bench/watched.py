"""A streamed answer, read on a thread of its own, with the time of every piece."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from convoy.errors import ConvoyError

_NEARLY = 0.9


class Watched:
    """Begins to read when it is made. ``pieces`` gives the text as it comes; what it raises is kept."""

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
        """So far."""
        with self._changed:
            return "".join(self._texts)

    @property
    def times_s(self) -> list[float]:
        """When each piece came (``time.monotonic``)."""
        with self._changed:
            return list(self._times)

    @property
    def is_over(self) -> bool:
        """Whether nothing comes any more, complete or not."""
        with self._changed:
            return self._over

    def wait_for(self, num_pieces: int, timeout_s: float) -> bool:
        """Until so many pieces are here or the answer is over: whether they are."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._times) >= num_pieces, timeout_s)
            return len(self._times) >= num_pieces

    def wait(self, timeout_s: float) -> bool:
        """Until the answer is over: whether it is, and complete."""
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
            raise  # a fault of ours: the thread's own hook tells it
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
    """From a loss to the end of the pause after it that begins before ``until_s``.

    What was on its way when the member was lost comes still; the pause that the loss made is the first that
    is nearly as long as the longest. None where nothing came after it.
    """
    pauses = [(length, end) for start, length, end in _pauses(times_s, lost_s) if start < until_s]
    longest = max((length for length, _ in pauses), default=0.0)
    return next((end - lost_s for length, end in pauses if length >= _NEARLY * longest), None)


def seconds_to_pace(times_s: Sequence[float], lost_s: float, pause_s: float) -> float:
    """From a loss to the end of the last pause longer than ``pause_s``: then all is as ever."""
    return max((end - lost_s for _, length, end in _pauses(times_s, lost_s) if length > pause_s), default=0.0)


def _pauses(times_s: Sequence[float], lost_s: float) -> list[tuple[float, float, float]]:
    """(start, length, end) of each that ends after the loss; what of it lies before does not count."""
    after = [at for at in times_s if at > lost_s]
    starts = [max((at for at in times_s if at <= lost_s), default=lost_s), *after[:-1]]
    return [(start, end - max(start, lost_s), end) for start, end in zip(starts, after, strict=False)]
