"""Define the pieces of an assistant's turn, in the order in which they are generated.

Every API builds its events from them. Pieces of two kinds never interleave: a reasoning, a text or a call is
complete when a piece of another kind, or of another call, follows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Hold text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Hold text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Hold a part of a tool call.

    ``index`` counts the calls of the turn from 0. The first piece of a call has the call's new ``id`` and its
    ``name``; later ones have neither. The ``arguments`` of all pieces make one JSON text of an object.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Piece = TextPiece | ReasoningPiece | CallPiece
