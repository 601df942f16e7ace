"""Read the engine's outputs as the pieces of an assistant's turn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import msgspec

from convoy.api.chat.parsed import ParsedRequest
from convoy.engine.outputs import FinishOutput, Output, TokenOutput
from convoy.model.text.formats.lexer import Lexeme
from convoy.model.text.pieces import Piece
from convoy.model.text.stop import StopFilter, TextStream


@dataclass(frozen=True, slots=True)
class Ended:
    """Report the end of a choice. ``stop`` is the stop string that matched, if one did."""

    reason: Literal["stop", "length", "tool_calls", "abort"]
    stop: str | None = None


class ReplyReader:
    """Turn the outputs of one request into pieces, in order, by choice."""

    def __init__(self, asked: ParsedRequest) -> None:
        self._choices = [_Choice(asked) for _ in range(asked.num_choices)]

    def read(self, output: Output) -> list[tuple[int, Piece | Ended]]:
        """Return the pieces that an output adds, each with the number of its choice."""
        match output:
            case TokenOutput(choice=choice, token_id=token_id, text=text):
                return [(choice, piece) for piece in self._choices[choice].push(token_id, text)]
            case FinishOutput(choice=choice):
                return [(choice, piece) for piece in self._choices[choice].finish(output)]
        return []


class _Choice:
    """Read one choice."""

    def __init__(self, asked: ParsedRequest) -> None:
        tokenizer, request = asked.model.tokenizer, asked.requests[0]
        reply_format = tokenizer.reply_format
        self._lexer = reply_format.lexer(lambda token_id: tokenizer.decode([token_id]))
        self._parser = reply_format.row.parser(asked.reply)
        # The engine holds back text that may begin a stop string. So the place of a mark needs the text of
        # the tokens themselves, and the engine does not tell which string matched.
        self._whole = TextStream(tokenizer) if request.stop else None
        self._stop = StopFilter(request.stop)
        self._num_tokens, self._min_tokens = 0, request.min_tokens

    def push(self, token_id: int, text: str) -> list[Piece]:
        whole = text
        self._num_tokens += 1
        if self._whole is not None:
            whole = self._whole.push(token_id)
            self._stop.push(whole, may_stop=self._num_tokens > self._min_tokens)
        return self._parse(self._lexer.push(token_id, whole, text))

    def finish(self, output: FinishOutput) -> list[Piece | Ended]:
        pieces = [*self._parse(self._lexer.finish(output.text)), *self._parser.finish()]
        stop = self._stop.matched if output.reason == "stop" else None
        if output.reason == "stop" and stop is None and self._parser.num_calls > 0:
            return [*pieces, Ended("tool_calls")]
        return [*pieces, Ended(output.reason, stop)]

    def _parse(self, lexemes: list[Lexeme]) -> list[Piece]:
        return [piece for lexeme in lexemes for piece in self._parser.read(lexeme)]


def raw_object(arguments: str) -> msgspec.Raw | None:
    """Return a call's arguments as the JSON text of an object on one line, or None for any other text.

    A JSON number may lie outside the range of every type, as 1e999 does, so none is converted.
    """
    text = arguments or "{}"
    try:
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    # In a JSON text that is valid, these stand between values alone.
    line = text.replace("\n", " ").replace("\r", " ")
    return msgspec.Raw(line.encode()) if isinstance(value, dict) else None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
