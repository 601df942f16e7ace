"""An answer on its way from a provider: its messages in order, with room for as many as its reader takes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from convoy.errors import ProviderError
from convoy.wire.fleet.messages import Began, Chunk, Done, Failed

AnswerMessage = Began | Chunk | Done | Failed


class ProviderFailed(ProviderError):  # noqa: N818
    """No answer, or no more of it. ``full``: the provider had no slot, and nothing is wrong with it.

    ``refused``: it does not take the sealed body, and another would not either.
    """

    def __init__(self, message: str, *, full: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.full = full
        self.refused = refused


class Answering:
    """Filled by a provider's socket, read by whoever serves the request; both on the loop's thread."""

    def __init__(self, request_id: str, window: int, grant: Callable[[int], None]) -> None:
        """``grant`` sends the provider leave for so many chunks more."""
        self.request_id = request_id
        self._window = window
        self._grant = grant
        self._messages: deque[AnswerMessage] = deque()
        self._filled = asyncio.Event()
        self._num_chunks = 0  # that wait here
        self._taken = 0  # since the last leave
        self._stage = "new"
        self.tokens = 0  # given so far, as the provider says

    def put(self, message: AnswerMessage) -> None:
        """The next message. Raises `ProviderError` for one that cannot come now, or too many chunks."""
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
        """The next message. Raises `ProviderFailed` where it does not come in time, or says so."""
        if not self._messages:  # a timer for each that is here already would cost more than opening it
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
        """Nothing more may come."""
        return self._stage == "over"
