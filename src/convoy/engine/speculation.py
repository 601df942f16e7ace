"""Drafts without a second model: what followed the last time that the sequence said what it says now.

Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding), which is LLMA's copying
from a reference (Yang et al., 2023, arXiv:2304.04487) with the sequence itself as the reference. Earlier
places are found as deflate finds them (RFC 1951, section 4): the latest place of a pair of tokens, and from
each place the one before it with the same pair. A guess costs microseconds, however long the sequence is:
each token is looked at once when it comes, and a bounded number of places when a guess is made.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from convoy.engine.sequence import Sequence


class Drafter(Protocol):
    """Guesses what a sequence says next."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """At most ``max_tokens`` guesses; none is fine."""

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """What came of the last guesses."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""


MAX_DRAFT = 64
_PAIR = 2  # tokens that must be the same before a place is looked at
_LONGEST = 16  # same tokens that are counted: more make no place better
_MAX_PLACES = 8  # looked at for one guess
_SURE = 8  # same tokens after which a guess is made whatever became of the last ones
_FIRST_LENGTH = 4
_FIRST_PAUSE = 4  # guesses that are left out after a length of 0; doubles while retries fail
_MAX_PAUSE = 64


class PlaceIndex:
    """Earlier places of each pair of tokens in one growing sequence."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # pair -> the position after it, the latest
        self._earlier = array("L", (0, 0))  # position -> the one before it with the same pair; 0: none

    def find(self, tokens: SequenceOf[int]) -> tuple[int, int]:
        """The position after the best earlier place, and how many tokens before it are those at the end.

        The most of these count, then the latest place. (0, 0): there is none.
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
        if len(self._earlier) > max(_PAIR, len(tokens)):  # it was cut back
            self._latest.clear()
            del self._earlier[_PAIR:]
        for position in range(len(self._earlier), len(tokens)):
            pair = _pair(tokens, position)
            self._earlier.append(self._latest.get(pair, 0))
            self._latest[pair] = position


def copy_from(tokens: SequenceOf[int], place: int, length: int) -> list[int]:
    """What followed ``place``, and past the end what that itself would be followed by."""
    guesses = list(tokens[place : place + length])
    period = len(tokens) - place
    while len(guesses) < length:
        guesses.append(guesses[len(guesses) - period])
    return guesses


@dataclass(slots=True)
class _Guessing:
    """How one sequence's guesses go: the next may have ``length`` tokens, once ``pause`` were left out."""

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
    """A `Drafter`: at most ``max_length`` guesses at once, fewer for who is often wrong."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._guessing: dict[Sequence, _Guessing] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """What followed the last time, if there was one."""
        guessing = self._guessing.get(sequence)
        if guessing is None:
            guessing = self._guessing[sequence] = _Guessing(min(_FIRST_LENGTH, self._max_length))
        place, num_same = guessing.index.find(sequence.tokens)
        if guessing.pause and num_same < _SURE:
            guessing.pause -= 1
            return []
        return copy_from(sequence.tokens, place, min(guessing.length, max_tokens)) if place else []

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """More after a guess that was right throughout, fewer after one that was not."""
        guessing = self._guessing.get(sequence)
        if guessing is not None and num_drafts:
            guessing.learn(num_drafts, num_accepted, self._max_length)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over, and its index with it."""
        self._guessing.pop(sequence, None)


def _pair(tokens: SequenceOf[int], end: int) -> int:
    return tokens[end - 2] << 32 | tokens[end - 1]


def _num_same(tokens: SequenceOf[int], place: int) -> int:
    """How many tokens before ``place`` are those at the end. A place of a sequence that was cut has 0."""
    most, end = min(_LONGEST, place), len(tokens)
    same = 0
    while same < most and tokens[place - 1 - same] == tokens[end - 1 - same]:
        same += 1
    return same
