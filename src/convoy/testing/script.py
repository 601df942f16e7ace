"""Make a served model answer from a script, so that agents run whole loops on a model with random weights.

Each turn is a literal grammar. It takes the place of a request's grammar on the way to the engine, so masks,
guesses, recovery and the parser of calls do what they do for ``structured_outputs``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convoy.api.service import Handle, ServedEngine, ServedModel, Service
from convoy.engine.outputs import Output, TokenOutput
from convoy.engine.requests.request import AnswerGrammar, GenerationRequest
from convoy.errors import ConfigError, RequestError
from convoy.model.text.conversation import Tool
from convoy.model.text.formats.grammar import CallRules
from convoy.model.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """Hold a turn that calls the tool ``name`` with exactly these arguments."""

    name: str
    arguments: Mapping[str, Any]


class Script:
    """Answer the requests of one agent with ``turns``, in order: a call, or the text of an answer.

    A request takes the next turn if its prompt names every tool of the script. Any other request gets the
    text ``beside``: agents ask for a title without tools. ``during`` is called on the engine's thread after
    each token of a turn, with the turn's number and its text so far.
    """

    def __init__(
        self,
        turns: Sequence[ScriptedCall | str],
        *,
        beside: str = "A title",
        during: Callable[[int, str], None] | None = None,
    ) -> None:
        if not turns or not beside:
            raise ConfigError("a script needs at least one turn, and a text for other requests")
        self.turns = tuple(turns)
        self.beside = beside
        self.during = during

    def serve(self, service: Service) -> Service:
        """Return ``service`` with one model, whose answers are those of this script."""
        (model,) = service.models
        return replace(service, models=(replace(model, engine=_ScriptedEngine(self, model)),))

    @property
    def tool_names(self) -> frozenset[str]:
        """Return the names of the tools that the turns call."""
        return frozenset(turn.name for turn in self.turns if isinstance(turn, ScriptedCall))


class _ScriptedEngine:
    """Give the requests of an engine their grammars."""

    def __init__(self, script: Script, model: ServedModel) -> None:
        self._script = script
        self._engine: ServedEngine = model.engine
        self._tokenizer = model.tokenizer
        # Compiled before the first request, because the event loop must not wait for it.
        self._turns = [_compiled(model, turn) for turn in script.turns]
        self._beside = _compiled(model, script.beside)
        self._next = 0

    @property
    def room(self) -> int:
        return self._engine.room

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None]) -> Handle:
        if not self._takes_a_turn(request):
            return self._engine.submit(replace(request, grammar=self._beside), on_output)
        number = self._next
        if number == len(self._turns):
            raise RequestError(f"the script has {number} turns, and this request is one more")
        self._next += 1
        request = replace(request, grammar=self._turns[number])
        return self._engine.submit(request, self._watched(number, on_output))

    def _watched(self, number: int, on_output: Callable[[Output], None]) -> Callable[[Output], None]:
        """Return ``on_output`` with the script told of each token after it."""
        during = self._script.during
        if during is None:
            return on_output
        text = ""

        def pass_on(output: Output) -> None:
            nonlocal text
            on_output(output)
            if isinstance(output, TokenOutput):
                text += output.text
                during(number, text)

        return pass_on

    def _takes_a_turn(self, request: GenerationRequest) -> bool:
        prompt = self._tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        return all(json.dumps(name) in prompt for name in self._script.tool_names)


@dataclass(frozen=True, slots=True)
class _LiteralRules(CallRules):
    """Write the values of a call as literal text: a JSON schema would leave the escapes of a string open."""

    def schema(self, tool: Tool) -> str:
        values = {name: value["enum"][0] for name, value in tool.parameters["properties"].items()}
        return self.text(json.dumps(values))

    def json(self, schema: Any, *, strict: bool) -> str:  # noqa: ARG002 - a literal is strict
        return self.text(json.dumps(schema["enum"][0]))


def _compiled(model: ServedModel, turn: ScriptedCall | str) -> AnswerGrammar:
    """Return the grammar of one turn. Raises `ConfigError` for a call if the model has no format of calls."""
    if isinstance(turn, str):
        grammar = Grammar("choice", json.dumps([turn]), param="script")
        return model.grammars.compile(grammar, "script")
    own = model.tokenizer.reply_format
    if own.row.grammar is None:
        raise ConfigError(f"{model.name} has no format of calls, so a script cannot call {turn.name}")
    properties = {name: {"enum": [value]} for name, value in turn.arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    tool = Tool(turn.name, parameters=schema)
    text = own.row.grammar(_LiteralRules((tool,), parallel=False, reasoning_end="", tokens=own.tokens))
    return model.grammars.compile(Grammar("lark", text, param="script"), "script")
