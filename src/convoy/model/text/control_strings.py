"""A set of control strings, searched for in short strides.

Python's ``re`` holds the interpreter lock for as long as one search takes. A prompt may have megabytes, so a
search covers a bounded piece of it, and other threads run between two pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

_STRIDE = 16_384
# A deeper trie than this may exceed the recursion limit of `re`.
_MAX_NESTED = 200

_Trie = dict[str, "_Trie"]
# No string has an empty key, so it marks the end of a member.
_END = ""


class ControlStrings:
    """Find control strings as an alternation of all would: the earliest match, and of those the longest."""

    def __init__(self, strings: Iterable[str], *, stride: int = _STRIDE) -> None:
        self._stride = stride
        members = sorted({text for text in strings if text}, key=len, reverse=True)
        self._longest = len(members[0]) if members else 0
        self._pattern = re.compile(_expression(members))
        short = [text for text in members if len(text) <= _MAX_NESTED]
        # An overlong member would fill these sets with its parts, so each text may then be a part of it.
        self._all_touch = len(short) < len(members)
        self._starts = frozenset(text[:size] for text in short for size in range(1, len(text)))
        self._ends = frozenset(text[size:] for text in short for size in range(1, len(text)))
        self._joined = "\n".join(short)

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the matches in ``text``, in order; none overlaps another."""
        if not self._longest:
            return
        position = 0
        while position < len(text):
            stride_end = position + self._stride
            # A match may begin in this stride and end in the next one.
            match = self._pattern.search(text, position, stride_end + self._longest - 1)
            if match is None or match.start() >= stride_end:
                position = stride_end
            else:
                yield match
                position = match.end()

    def findall(self, text: str) -> list[str]:
        """Return the text of every match."""
        return [match[0] for match in self.finditer(text)]

    def may_join(self, text: str) -> bool:
        """Tell whether ``text`` can be a part of a control string together with text before or behind it."""
        if self._all_touch:
            return bool(text)
        if 0 < len(text) < self._longest and text in self._joined:
            return True
        sizes = range(1, min(self._longest, len(text) + 1))
        return any(text[-size:] in self._starts or text[:size] in self._ends for size in sizes)

    def sub(self, change: Callable[[str], str], text: str) -> str:
        """Return ``text`` with each match replaced by ``change`` of it."""
        pieces = []
        position = 0
        for match in self.finditer(text):
            pieces += [text[position : match.start()], change(match[0])]
            position = match.end()
        pieces.append(text[position:])
        return "".join(pieces)


def _expression(longest_first: list[str]) -> str:
    """Return a pattern with a cost per character that does not grow with the number of strings."""
    long = [re.escape(text) for text in longest_first if len(text) > _MAX_NESTED]
    trie: _Trie = {}
    for text in longest_first:
        if len(text) <= _MAX_NESTED:
            node = trie
            for letter in text:
                node = node.setdefault(letter, {})
            node[_END] = {}
    return "|".join([*long, *([_nested(trie)] if trie else [])]) or "(?!)"


def _nested(node: _Trie) -> str:
    branches = [re.escape(letter) + _nested(child) for letter, child in node.items() if letter != _END]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    # The regular expression prefers a longer string to the one that ends here.
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"
