"""Read the engine's outputs as the pieces of an assistant's turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convoy.api.chat.parsed import ParsedRequest
from convoy.engine.outputs import FinishOutput, Output, TokenOutput
from convoy.model.text.pieces import Piece, TextPiece


@dataclass(frozen=True, slots=True)
class Ended:
    """Report the end of a choice. ``stop`` is the stop string that matched, if one did."""

    reason: Literal["stop", "length", "tool_calls", "abort"]
    stop: str | None = None


class ReplyReader:
    """Turn the outputs of one request into pieces, in order, by choice."""

    def __init__(self, asked: ParsedRequest) -> None:
        self._asked = asked

    def read(self, output: Output) -> list[tuple[int, Piece | Ended]]:
        """Return the pieces that an output adds, each with the number of its choice."""
        match output:
            case TokenOutput(choice=choice, text=text):
                return [(choice, TextPiece(text))] if text else []
            case FinishOutput(choice=choice, reason=reason, text=text):
                held: list[tuple[int, Piece | Ended]] = [(choice, TextPiece(text))] if text else []
                return [*held, (choice, Ended(reason))]
        return []
