"""Take names, addresses, paths and everything that looks like a key out of lines, and drop foreign lines.

A line is kept only if it begins as a line of Convoy does. Any other line may quote anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# The first words of lines that commands and logs of Convoy print, and of tracebacks' places.
_KNOWN = re.compile(
    r"^(?:\d\d:\d\d:\d\d )?(?:error|hint|warning|note|starting|listening|head|loading|ready|active|ended|"
    r"lost|refused|joined|in use|recovered|standby|roster|metrics): "
)
_PLACE = re.compile(r"^\s+\S*?(convoy/\S+|[^/\s]+):(\d+) in (\w+)$")
_FIELD = re.compile(r"[a-z]+(?:_[a-z]+)+")
# In this order: a URL has an address, and an address has digits.
_PATTERNS = (
    (re.compile(r"(?i)\b(?:bearer|basic)\s+\S+"), "(key)"),
    (re.compile(r"[a-z][a-z0-9+.-]*://\S+"), "(url)"),
    (re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`"), "(quoted)"),
    (re.compile(r"\S*@\S+"), "(address)"),
    (re.compile(r"(?<!\S)(?!(?:[kMGT]?B|GFLOP)/s\b)\S*/\S+"), "(path)"),
    (re.compile(r"\[?\b[0-9a-fA-F]{0,4}(?:::?[0-9a-fA-F]{1,4}){2,7}\]?(?::\d+)?"), "(address)"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "(address)"),
    (re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}(?::\d+)?\b"), "(name)"),
    # Keys, tokens, fingerprints and invitations: long words with a digit or an underscore.
    (re.compile(r"\b(?!ChaCha20)(?=[\w-]*[\d_])[\w-]{16,}\b"), "(key)"),
    (re.compile(r"\b(?:[0-9a-fA-F]{12,}|[A-Za-z]{24,})\b"), "(key)"),
    (re.compile(r"\b(?:hf|sk|ghp|convoy1)[-_]?[A-Za-z0-9]{6,}\b"), "(key)"),
)


class Redaction:
    """Replace the ``words`` of one machine by their placeholders, and what any machine keeps private."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self._words = [
            (re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])"), shown)
            # The longest first: a name may be a part of another.
            for word, shown in sorted(words.items(), key=lambda pair: -len(pair[0]))
            if word
        ]

    def text(self, text: str) -> str:
        """Return ``text`` on one line without private parts."""
        text = " ".join(text.split())
        for pattern, shown in (*self._words, *_PATTERNS):
            text = pattern.sub(shown, text)
        return text

    def log(self, lines: Iterable[str]) -> tuple[list[str], int]:
        """Return the known lines without private parts, and the number of lines that were left out."""
        kept, left_out = [], 0
        for line in lines:
            if place := _PLACE.match(line):
                kept.append("  {}:{} in {}".format(*place.groups()))
            elif _KNOWN.match(line):
                kept.append(self.text(line))
            else:
                left_out += 1
        return kept, left_out

    def value(self, value: object) -> object:
        """Return a JSON value with numbers as they are, and each text without private parts."""
        if isinstance(value, Mapping):
            return {self._key(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def _key(self, key: str) -> str:
        """Return a key of JSON. Names of fields look like secrets, and two of them must not become one."""
        if _FIELD.fullmatch(key) is None:
            return self.text(key)
        for pattern, shown in self._words:
            key = pattern.sub(shown, key)
        return key
