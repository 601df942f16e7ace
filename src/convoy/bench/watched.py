"""A streamed answer, read on a thread of its own, with the time of every piece."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from convoy.errors import ConvoyError


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
        except Exception as error:
            self.error = f"internal error: {type(error).__name__}"
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
    """From a loss to the end of the longest pause after it that begins before ``until_s``.

    What was on its way when the member was lost comes still; the pause is what the loss made. None where
    nothing came after it.
    """
    before = [at for at in times_s if at <= lost_s]
    after = [at for at in times_s if at > lost_s]
    if not after:
        return None
    starts = [max(before, default=lost_s), *after[:-1]]
    pauses = [
        (end - max(start, lost_s), end) for start, end in zip(starts, after, strict=True) if start < until_s
    ]
    return max(pauses)[1] - lost_s if pauses else None
