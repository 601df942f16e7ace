"""Follow one answer through its grammar, and tell which tokens may come next.

A mask has one bit for each token of the vocabulary, lowest bit first, in little-endian words of 32 bits.
The engine's scheduling side reads this module, so it imports neither threads nor a tokeniser.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_WORD_BITS = 32
# The processor time that the tokens of one answer may take to follow: at first, and for each token. A usual
# schema takes 0.03 ms a token. An ambiguous grammar takes more with each token, and all answers wait for it.
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
        """Tell whether the grammar has hit a limit of the library.

        The library then allows only the end of text, wherever the answer is, and never recovers.
        """
        return self.native.is_error()

    def consume(self, token_id: int) -> bool:
        """Move on by one token; return False if the grammar does not allow it or took too much time."""
        began_s = time.thread_time()
        followed = self.native.consume_token(token_id)
        self._left_s += _TOKEN_S - (time.thread_time() - began_s)
        return followed and self._left_s > 0

    def allowed_start(self, drafts: Sequence[int]) -> int:
        """Return how many of ``drafts``, in order, the grammar allows next."""
        return self.native.validate_tokens(list(drafts)) if drafts else 0

    def forced(self) -> list[int]:
        """Return the tokens of the one text that can come next; empty if there is a choice."""
        return self.native.compute_ff_tokens()


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """Hold a compiled grammar, which several requests may share. It is never moved on itself."""

    native: LLMatcher
    vocab_size: int

    def matcher(self) -> Matcher:
        """Return a new matcher, at the start of an answer."""
        return Matcher(self.native.deep_copy(), self.vocab_size)


class MaskFiller:
    """Compute the masks of a step for all its answers at once, on several threads of the library."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, parts: Iterable[tuple[Matcher, Sequence[int]]]) -> None:
        """Set `Matcher.masks` of each matcher: one mask, and one more after each of its drafts.

        The grammar must allow the drafts; see `Matcher.allowed_start`.
        """
        rows, places = 0, []
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
        # The library has a call for each kind, and the second refuses an empty list of drafts.
        plain = [(matcher.native, row) for matcher, row, drafts in places if not drafts]
        drafted = [(matcher.native, row, drafts) for matcher, row, drafts in places if drafts]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, buffer.ctypes.data, size, rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, buffer.ctypes.data, size, rows)
        for matcher, row, drafts in places:
            matcher.masks = [one.tobytes() for one in buffer[row : row + 1 + len(drafts)]]
