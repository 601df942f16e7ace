"""Follow one answer through its grammar, and tell which tokens may come next.

A mask has one bit for each token of the vocabulary, lowest bit first, in little-endian words of 32 bits.
The engine's scheduling side reads this module, so it imports neither threads nor a tokeniser.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher

_Result = TypeVar("_Result")
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Hold the bounds on the answers of one grammar."""

    # The processor time that the tokens and the masks of one answer may take: at first, and for each token.
    # A usual schema takes 0.03 ms a token. An ambiguous grammar takes more with each token, and all answers
    # wait for it. The library's own limits do not bound it: 300 recursive choices take 0.1 s a mask, below
    # all of them. Processor time, unlike time on the wall, does not shorten an answer on a busy machine.
    first_s: float = 1.0
    token_s: float = 0.005
    # The library's automaton grows with the texts that it follows, and its size is limited. So new answers
    # get another one after this many tokens of all of them.
    shared_tokens: int = 1000


def mask_bytes(vocab_size: int) -> int:
    """Return the size of one mask."""
    return -(-vocab_size // _WORD_BITS) * _WORD_BITS // 8


class Matcher:
    """Hold the place of one answer in its grammar. It moves only when a token becomes part of the answer.

    So a preemption, a replay or a recovery of the sequence changes nothing here. Guesses are followed in a
    second copy of the grammar: a limit in a path that the answer need not take only ends its guesses.
    """

    def __init__(self, grammar: CompiledGrammar, clock: Callable[[], float]) -> None:
        """Begin an answer. ``clock`` returns the processor time of the calling thread, in seconds."""
        self.native = grammar.native.deep_copy()
        # None once the guesses have hit a limit.
        self.guesser: LLMatcher | None = grammar.guesser.deep_copy()
        self.vocab_size = grammar.vocab_size
        self.limits = grammar.limits
        # The masks of the step that is being made: of the next token, and after each draft. There is only
        # the first if the drafts have hit a limit: then no draft counts.
        self.masks: Sequence[bytes] = ()
        self._grammar = grammar
        self._clock = clock
        self._left_s = self._left_for_guesses_s = self.limits.first_s

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
        began_s = self._clock()
        followed = self.native.consume_token(token_id)
        self._left_s += self.limits.token_s - (self._clock() - began_s)
        self._grammar.wear(failed=self.native.is_error())
        self._left_for_guesses_s += self.limits.token_s
        self._guess(lambda guesser: guesser.consume_token(token_id), False)
        return followed and self._left_s > 0

    def allowed_start(self, drafts: Sequence[int]) -> int:
        """Return how many of ``drafts``, in order, the grammar allows next; 0 if it follows no guesses."""
        tokens = list(drafts)
        return self._guess(lambda guesser: guesser.validate_tokens(tokens), 0) if tokens else 0

    def forced(self) -> list[int]:
        """Return the tokens of the one text that can come next; empty if there is a choice."""
        return self._guess(lambda guesser: guesser.compute_ff_tokens(), [])

    def compute(self, drafts: Sequence[int], buffer: npt.NDArray[np.uint8]) -> None:
        """Set `masks` through ``buffer``, [1 + drafts, bytes of a mask], on the calling thread.

        The first mask is charged to the answer, and those of drafts to its guesses.
        """

        def guess_masks(guesser: LLMatcher) -> int:
            for row, token_id in zip(buffer[1:], drafts, strict=True):
                guesser.consume_token(token_id)
                guesser.unsafe_compute_mask_ptr(row.ctypes.data, row.size)
            guesser.rollback(len(drafts))
            return len(buffer)

        began_s = self._clock()
        self.native.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.shape[1])
        self._left_s -= self._clock() - began_s
        self.take_masks(buffer[: self._guess(guess_masks, 1) if drafts else 1])

    def take_masks(self, masks: npt.NDArray[np.uint8]) -> None:
        """Set `masks`, [1 + drafts, bytes of a mask], as far as they were computed within all limits."""
        if self.native.is_error():
            self._grammar.wear(failed=True)
        if self.guesser is None or self.guesser.is_error():
            masks = masks[:1]
        self.masks = [mask.tobytes() for mask in masks]

    def _guess(self, work: Callable[[LLMatcher], _Result], nothing: _Result) -> _Result:
        """Return the result of ``work`` with the guesser, or ``nothing`` if a limit has ended the guesses."""
        if self.guesser is None:
            return nothing
        began_s = self._clock()
        result = work(self.guesser)
        self._left_for_guesses_s -= self._clock() - began_s
        if self.guesser.is_error():
            self._grammar.wear(failed=True)
            self.guesser = None
            return nothing
        if self._left_for_guesses_s <= 0:
            self.guesser = None
        return result


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """Hold a grammar, compiled once for answers and once for their guesses. It is never moved on itself.

    Several requests may share it. All copies of either share the library's automaton, which only grows, and
    at its limit none of them goes on. So a grammar wears out: a new request gets a new one then.
    """

    native: LLMatcher
    guesser: LLMatcher
    vocab_size: int
    limits: AnswerLimits = field(default_factory=AnswerLimits)
    worn: bool = False
    _num_tokens: int = 0

    def matcher(self, clock: Callable[[], float] = time.thread_time) -> Matcher:
        """Return a new matcher, at the start of an answer; see `Matcher` for ``clock``."""
        return Matcher(self, clock)

    def wear(self, *, failed: bool) -> None:
        """Count a token of an answer, which may have ``failed`` at a limit of the automaton."""
        self._num_tokens += 1
        self.worn = self.worn or failed or self._num_tokens >= self.limits.shared_tokens


# A matcher, the row of its first mask, and its drafts.
_Place = tuple[Matcher, int, list[int]]


class MaskFiller:
    """Compute the masks of a step for all its answers at once, on several threads of the library.

    The processor time of these threads cannot be divided among the answers. So after a step that takes
    longer than its answers earn, each answer's masks are computed on the calling thread and charged to it,
    until a step is fast again. ``clock`` returns seconds. A busy machine changes the way, and no charge.
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

        buffer = np.zeros((rows, mask_bytes(places[0][0].vocab_size)), dtype=np.uint8)
        began_s = self._clock()
        if self._one_by_one or len(places) == 1:
            for matcher, row, drafts in places:
                matcher.compute(drafts, buffer[row : row + 1 + len(drafts)])
        else:
            self._compute(places, buffer)
        self._one_by_one = self._clock() - began_s > sum(one.limits.token_s for one, _, _ in places)

    def _compute(self, places: Sequence[_Place], buffer: npt.NDArray[np.uint8]) -> None:
        """Set the masks of ``places`` through ``buffer``, [rows, bytes of a mask], on several threads."""
        if self._executor is None:
            # Imported only where a request has a grammar.
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        rows, size = buffer.shape
        # These include the first masks, so those of the answers themselves come later.
        drafted = [(one.guesser, row, drafts) for one, row, drafts in places if drafts and one.guesser]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, buffer.ctypes.data, size, rows)
        plain = [(matcher.native, row) for matcher, row, _ in places]
        self._executor.unsafe_compute_mask_ptr(plain, buffer.ctypes.data, size, rows)
        for matcher, row, drafts in places:
            matcher.take_masks(buffer[row : row + 1 + len(drafts)])
