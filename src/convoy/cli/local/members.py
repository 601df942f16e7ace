"""Members on the command line: the flag of their spans, and a list of members with their memory."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.errors import UsageError
from convoy.sdk.names import local_names
from convoy.sdk.planning.members import parse_gb

LayersFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--layers", help="SPAN of the next member, NAME=SPAN or NAME+NAME=SPAN; 0:3,output and 4:11."
    ),
]


def parse_members(text: str) -> tuple[tuple[str, int | None], ...]:
    """Parse ``3`` or ``alpha=8,beta=16GB``. Return names with bytes, or with None for a bare count.

    Raises UsageError.
    """
    if text.isascii() and text.isdigit():
        return tuple((name, None) for name in local_names(int(text[:9])))
    members: list[tuple[str, int | None]] = []
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        num_bytes = parse_gb(size)
        if not name or not equals or num_bytes is None:
            raise UsageError(
                f"--members has {part.strip()[:80]!r}, expected a count or NAME=GB,NAME=GB",
                hint="--members 3, or --members alpha=8,beta=16",
            )
        if name in dict(members):
            raise UsageError(f"--members names {name[:80]} twice", hint="give each machine a name of its own")
        members.append((name, num_bytes))
    return tuple(members)
