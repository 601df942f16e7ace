"""Follow one answer through its grammar, and tell which tokens may come next.

A mask has one bit for each token of the vocabulary, lowest bit first, in little-endian words of 32 bits.
The engine's scheduling side reads this module, so it imports neither threads nor a tokeniser.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher

_WORD_BITS = 32
# The time that the tokens and the masks of one answer may take: at first, and for each token. A usual schema
# takes 0.03 ms a token. An ambiguous grammar takes more with each token, and all answers wait for it.
_FIRST_S = 1.0
_TOKEN_S = 0.005


def mask_bytes(vocab_size: int) -> int:
    """Return the size of one mask."""
    return -(-vocab_size // _WORD_BITS) * _WORD_BITS // 8


class Matcher:
    """Hold the place of one answer in its grammar. It moves only when a token becomes part of the answer.

    So a preemption, a replay or a recovery of the sequence changes nothing here.
    """

    def __init__(self, native: LLMatcher, vocab_size: int) -> None:
        self.native = native
        self.vocab_size = vocab_size
        # The masks of the step that is being made: of the next token, and after each draft.
        self.masks: Sequence[bytes] = ()
        self._left_s = _FIRST_S

    @property
    def complete(self) -> bool:
        """Tell whether the answer is complete, so that no other token may follow."""
        return self.native.is_stopped() and not self.failed

    @property
    def failed(self) -> bool:
        """Tell whether the grammar has hit a limit of the library, or took more time than the answer has.

        At its limit the library allows only the end of text, wherever the answer is, and never recovers.
        """
        return self._left_s <= 0 or self.native.is_error()

    def consume(self, token_id: int) -> bool:
        """Move on by one token; return False if the grammar does not allow it or took too much time."""
        began_s = time.thread_time()
        followed = self.native.consume_token(token_id)
        self._left_s += _TOKEN_S
        self.charge(time.thread_time() - began_s)
        return followed and self._left_s > 0

    def charge(self, took_s: float) -> None:
        """Subtract ``took_s`` from the time that is left to this answer."""
        self._left_s -= took_s

    def allowed_start(self, drafts: Sequence[int]) -> int:
        """Return how many of ``drafts``, in order, the grammar allows next."""
        return self.native.validate_tokens(list(drafts)) if drafts else 0

    def forced(self) -> list[int]:
        """Return the tokens of the one text that can come next; empty if there is a choice."""
        return self.native.compute_ff_tokens()


# A matcher, the row of its first mask, and its drafts.
_Place = tuple[Matcher, int, list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """Hold a compiled grammar, which several requests may share. It is never moved on itself."""

    native: LLMatcher
    vocab_size: int

    def matcher(self) -> Matcher:
        """Return a new matcher, at the start of an answer."""
        return Matcher(self.native.deep_copy(), self.vocab_size)


class MaskFiller:
    """Compute the masks of a step for all its answers at once, on several threads of the library.

    The time of a step cannot be divided among its answers. So after a step that takes longer than its answers
    earn, each answer's masks are computed and charged by themselves, until a step is fast again.
    ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._executor: LLExecutor | None = None
        self._clock = clock
        self._one_by_one = False

    def fill(self, parts: Iterable[tuple[Matcher, Sequence[int]]]) -> None:
        """Set `Matcher.masks` of each matcher: one mask, and one more after each of its drafts.

        The grammar must allow the drafts; see `Matcher.allowed_start`.
        """
        rows = 0
        places: list[_Place] = []
        for matcher, drafts in parts:
            places.append((matcher, rows, list(drafts)))
            rows += 1 + len(drafts)
        if not places:
            return
        # Proxies import this module too, and compute nothing.
        import numpy as np

        size = mask_bytes(places[0][0].vocab_size)
        buffer = np.zeros((rows, size), dtype=np.uint8)
        if self._executor is None:
            # Imported only where a request has a grammar.
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        began_s = self._clock()
        if self._one_by_one or len(places) == 1:
            for place in places:
                before_s = self._clock()
                _compute(self._executor, [place], buffer)
                place[0].charge(self._clock() - before_s)
        else:
            _compute(self._executor, places, buffer)
        self._one_by_one = self._clock() - began_s > _TOKEN_S * len(places)
        for matcher, row, drafts in places:
            matcher.masks = [one.tobytes() for one in buffer[row : row + 1 + len(drafts)]]


def _compute(executor: LLExecutor, places: Sequence[_Place], buffer: npt.NDArray[np.uint8]) -> None:
    """Fill the rows of ``places`` in ``buffer``, [rows, bytes of a mask]."""
    rows, size = buffer.shape
    # The library has a call for each kind, and the second refuses an empty list of drafts.
    plain = [(matcher.native, row) for matcher, row, drafts in places if not drafts]
    drafted = [(matcher.native, row, drafts) for matcher, row, drafts in places if drafts]
    if plain:
        executor.unsafe_compute_mask_ptr(plain, buffer.ctypes.data, size, rows)
    if drafted:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, buffer.ctypes.data, size, rows)
