"""Queue an answer's messages, on their way from a provider, within the window that its reader grants."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from convoy.errors import ProviderError
from convoy.wire.fleet.messages import Began, Chunk, Done, Failed

AnswerMessage = Began | Chunk | Done | Failed


class ProviderFailed(ProviderError):  # noqa: N818
    """Signal that a provider gives no answer, or no more of it.

    ``full``: the provider had no slot, and nothing is wrong with it. ``refused``: it does not take the sealed
    body, and another provider would not either.
    """

    def __init__(self, message: str, *, full: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.full = full
        self.refused = refused


class Answering:
    """Hold the messages of one answer. A provider's socket fills it, and the request's handler reads it.

    Both run on the event loop's thread.
    """

    def __init__(self, request_id: str, window: int, grant: Callable[[int], None]) -> None:
        """Make an empty queue. ``grant`` allows the provider to send that many more chunks."""
        self.request_id = request_id
        self._window = window
        self._grant = grant
        self._messages: deque[AnswerMessage] = deque()
        self._filled = asyncio.Event()
        # Chunks that wait here.
        self._num_chunks = 0
        # Chunks that were read since the last grant.
        self._taken = 0
        self._stage = "new"
        # Tokens given so far, as the provider reports them.
        self.tokens = 0

    def put(self, message: AnswerMessage) -> None:
        """Append the next message.

        Raises `ProviderError` for a message out of order, or for too many chunks.
        """
        match message:
            case Began() if self._stage == "new":
                self._stage = "begun"
            case Chunk(tokens=tokens, last=last) if self._stage == "begun" and tokens >= self.tokens:
                self._num_chunks += 1
                if self._num_chunks + self._taken > self._window:
                    raise ProviderError(f"more than {self._window} chunks of an answer came without leave")
                self.tokens = tokens
                self._stage = "said" if last else "begun"
            case Done() if self._stage == "said":
                self._stage = "over"
            case Failed() if self._stage != "over":
                self._stage = "over"
            case _:
                raise ProviderError(
                    f"{type(message).__name__} of an answer came where it is {self._stage}, or counts back"
                )
        self._messages.append(message)
        self._filled.set()

    async def get(self, timeout_s: float) -> AnswerMessage:
        """Return the next message.

        Raises `ProviderFailed` if it does not come in time, or if the provider reports a failure.
        """
        # A timer for each message that is here already would cost more than opening the message.
        if not self._messages:
            await self._wait(timeout_s)
        message = self._messages.popleft()
        if isinstance(message, Failed):
            reason = message.reason or "a provider gave no reason"
            raise ProviderFailed(reason, full=message.full, refused=message.refused)
        if isinstance(message, Chunk):
            self._num_chunks -= 1
            self._taken += 1
            if self._taken * 2 >= self._window and self._stage == "begun":
                self._grant(self._taken)
                self._taken = 0
        return message

    async def _wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._messages:
                    self._filled.clear()
                    await self._filled.wait()
        except TimeoutError:
            raise ProviderFailed(f"a provider said nothing for {timeout_s:g} s") from None

    @property
    def is_over(self) -> bool:
        """Return whether the answer is over, so that no more messages may come."""
        return self._stage == "over"
