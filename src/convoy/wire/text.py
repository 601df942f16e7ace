"""Make a peer's text harmless before it reaches a log, an event, an error or a terminal.

`wire.codec` does this for every message that carries text, so no later code has to.
"""

from __future__ import annotations

from convoy.errors import FrameError

MAX_NAME_CHARS = 255


def plain_text(text: str, max_chars: int) -> str:
    """Return ``text`` on one line, without control, format or private characters, cut to ``max_chars``.

    A removed character shows as a question mark: line ends, escape sequences and writing directions could
    forge a log or draw on a terminal.
    """
    cut = text if len(text) <= max_chars else text[: max_chars - 3] + "..."
    return "".join(char if char.isprintable() else "?" for char in cut)


def require_plain(name: str, what: str) -> None:
    """Raise `FrameError` for a name that is too long or not printable.

    A name is compared and digested, so it is refused instead of changed.
    """
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise FrameError(
            f"{what} is {plain_text(name, 40)!r} with {len(name)} characters, expected at most "
            f"{MAX_NAME_CHARS} that can be printed"
        )
