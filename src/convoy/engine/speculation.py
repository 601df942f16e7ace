"""Drafts without a second model: a guess copies the continuation of the last similar passage of the sequence.

This is prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding). It is LLMA's
copying from a reference (Yang et al., 2023, arXiv:2304.04487) with the sequence itself as the reference.
Earlier places are found as deflate finds them (RFC 1951, section 4): the latest place of a pair of tokens,
and from each place the previous place of the same pair. A guess costs microseconds, however long the sequence
is: each token is indexed once when it comes, and a guess looks at a bounded number of places.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from convoy.config.table import MAX_DRAFT
from convoy.engine.sequence import Drafter, Sequence

# Tokens that must match before a place is looked at.
_PAIR = 2
# Matching tokens are counted up to this number: more do not make a place better.
_LONGEST = 16
# Places looked at for one guess.
_MAX_PLACES = 8
# With this many matching tokens a guess is made, whatever became of the last ones.
_SURE = 8
_FIRST_LENGTH = 4
# Guesses skipped after a length of 0; doubles while retries fail.
_FIRST_PAUSE = 4
_MAX_PAUSE = 64


class PlaceIndex:
    """Index the earlier places of each pair of tokens in one growing sequence."""

    def __init__(self) -> None:
        # Maps a pair to the latest position after it.
        self._latest: dict[int, int] = {}
        # Maps a position to the previous one after the same pair; 0 means none.
        self._earlier = array("L", (0, 0))

    def find(self, tokens: SequenceOf[int]) -> tuple[int, int]:
        """Return the position after the best earlier place, and how many tokens before it match the end.

        The place with the most matching tokens wins, then the latest. Return (0, 0) if there is none.
        """
        self._extend(tokens)
        best = best_same = 0
        if len(tokens) <= _PAIR:
            return best, best_same
        place = self._latest.get(_pair(tokens, len(tokens)), 0)
        for _ in range(_MAX_PLACES):
            if not place:
                break
            same = _num_same(tokens, place)
            if same > best_same:
                best, best_same = place, same
            if same == _LONGEST:
                break
            place = self._earlier[place]
        return best, best_same

    def _extend(self, tokens: SequenceOf[int]) -> None:
        # The sequence was cut back, so index it anew.
        if len(self._earlier) > max(_PAIR, len(tokens)):
            self._latest.clear()
            del self._earlier[_PAIR:]
        for position in range(len(self._earlier), len(tokens)):
            pair = _pair(tokens, position)
            self._earlier.append(self._latest.get(pair, 0))
            self._latest[pair] = position


def copy_from(tokens: SequenceOf[int], place: int, length: int) -> list[int]:
    """Return ``length`` tokens copied from ``place`` on; past the sequence's end the copy repeats
    periodically.
    """
    guesses = list(tokens[place : place + length])
    period = len(tokens) - place
    while len(guesses) < length:
        guesses.append(guesses[len(guesses) - period])
    return guesses


@dataclass(slots=True)
class _Guessing:
    """Track how well one sequence's guesses do.

    The next guess may have ``length`` tokens, after ``pause`` skipped ones.
    """

    length: int
    index: PlaceIndex = field(default_factory=PlaceIndex)
    pause: int = 0
    next_pause: int = _FIRST_PAUSE

    def learn(self, num_drafts: int, num_accepted: int, max_length: int) -> None:
        if num_accepted:
            self.next_pause = _FIRST_PAUSE
        if num_accepted == num_drafts:
            self.length = min(max_length, max(self.length, 2 * num_drafts))
        elif num_accepted:
            self.length = num_accepted + 1
        else:
            self.length = min(self.length, num_drafts) // 2
        if not self.length:
            self.length = 1
            self.pause = self.next_pause
            self.next_pause = min(_MAX_PAUSE, 2 * self.next_pause)


class LookupDrafter:
    """Guess at most ``max_length`` tokens at once by prompt lookup, and fewer after wrong guesses."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._guessing: dict[Sequence, _Guessing] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Return the continuation of the best earlier place, if there is one and no pause is due."""
        guessing = self._guessing.get(sequence)
        if guessing is None:
            guessing = self._guessing[sequence] = _Guessing(min(_FIRST_LENGTH, self._max_length))
        place, num_same = guessing.index.find(sequence.tokens)
        if guessing.pause and num_same < _SURE:
            guessing.pause -= 1
            return []
        return copy_from(sequence.tokens, place, min(guessing.length, max_tokens)) if place else []

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Allow longer guesses after a fully accepted one, and shorter ones after a rejection."""
        guessing = self._guessing.get(sequence)
        if guessing is not None and num_drafts:
            guessing.learn(num_drafts, num_accepted, self._max_length)

    def forget(self, sequence: Sequence) -> None:
        """Drop the index of a sequence that is over."""
        self._guessing.pop(sequence, None)


class GrammarDrafter:
    """Guess within a sequence's grammar: first the tokens that it forces, else those of another drafter.

    A forced text is known before it is sampled, so several of its tokens run in one step. Guesses that the
    grammar refuses are never sent. A model may write a forced text in other tokens than the tokenizer does.
    So the next forced guess is half as long after a refusal, and twice as long after a whole one.
    """

    def __init__(self, other: Drafter | None = None) -> None:
        self._other = other
        # Sequences with a last guess that was forced: its acceptance says nothing of the other drafter.
        self._forced: set[Sequence] = set()
        # The most tokens of the next forced guess, for sequences that have refused one.
        self._lengths: dict[Sequence, int] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Return forced tokens, or the other drafter's as far as the grammar allows them."""
        matcher = sequence.matcher
        if matcher is None:
            return [] if self._other is None else self._other.propose(sequence, max_tokens)
        self._forced.discard(sequence)
        guesses = matcher.forced()[: min(max_tokens, self._lengths.get(sequence, MAX_DRAFT))]
        if guesses:
            self._forced.add(sequence)
        elif self._other is not None:
            guesses = self._other.propose(sequence, max_tokens)
        return guesses[: matcher.allowed_start(guesses)]

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Adapt the length of forced guesses, or tell the other drafter how its guess did."""
        if sequence in self._forced:
            if num_accepted < num_drafts:
                self._lengths[sequence] = max(1, num_drafts // 2)
            elif sequence in self._lengths:
                self._lengths[sequence] = min(MAX_DRAFT, 2 * self._lengths[sequence])
        elif self._other is not None:
            self._other.learn(sequence, num_drafts, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that is over."""
        self._forced.discard(sequence)
        self._lengths.pop(sequence, None)
        if self._other is not None:
            self._other.forget(sequence)


def _pair(tokens: SequenceOf[int], end: int) -> int:
    return tokens[end - 2] << 32 | tokens[end - 1]


def _num_same(tokens: SequenceOf[int], place: int) -> int:
    """Return how many tokens before ``place`` match the sequence's end; 0 if the sequence was cut."""
    most, end = min(_LONGEST, place), len(tokens)
    same = 0
    while same < most and tokens[place - 1 - same] == tokens[end - 1 - same]:
        same += 1
    return same
