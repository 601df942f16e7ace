"""Whatever random weights draw, a forced call is valid by its tool's schema, on all three APIs.

Each API has requests in its own shape, and draws of its own from the grammars that its adapter makes.
Run as a program, it draws one whole reply of each API for each seed, and prints the counts as it goes. A
range of seeds may be split over several runs, or taken up after the last seed that was printed:

    PYTHONPATH=tests python tests/api/test_forced_calls.py 10000
    PYTHONPATH=tests python tests/api/test_forced_calls.py 5000 5000      the first seed, and their number
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema
import numpy as np
import pytest

from convoy.api.chat.parsed import ParsedRequest
from convoy.engine.outputs import FinishOutput, TokenOutput
from convoy.model.constraints.matcher import CompiledGrammar, MaskFiller
from convoy.model.text.conversation import Tool
from convoy.model.text.stop import TextStream
from convoy.model.text.tokens import Tokenizer
from support.chat_templates import FAMILIES, load_family
from support.replies import ROWS, SCHEMA
from support.three_apis import APIS, builder, calls_in, forcing, service_of, translated

CALLING = [name for name in FAMILIES if ROWS[name].grammar is not None]
TOOLS = (
    Tool("read", "Read a file.", SCHEMA, strict=True),
    Tool(
        "measure",
        "Measure.",
        {
            "type": "object",
            "properties": {
                "size": {"type": "number"},
                "count": {"type": "integer"},
                "unit": {"enum": ["mm", "inch"]},
                "points": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}},
                        "required": ["x", "on"],
                    },
                    "minItems": 1,
                },
            },
            "required": ["size", "unit", "points"],
        },
        strict=True,
    ),
    Tool("list", "List.", {"type": "object", "properties": {}}, strict=True),
)
CHOICES = (TOOLS, TOOLS[:1], TOOLS[1:])
# What closes a string, a value or a text. Random text ends soon if it is likely.
CLOSING = '"}]<,/'
# Texts that end a free text, which single characters hardly ever spell by chance.
ENDS = {"qwen-tags": "\n</parameter>\n", "dsml": "</"}
MAX_TOKENS = 500
# A reply is cut at that length in less than one of ten draws.
MAX_DRAWS = 20
VALIDATORS = {tool.name: jsonschema.Draft202012Validator(tool.parameters) for tool in TOOLS}
# The offered tools, and the one that must be called.
NAMED = tuple((tools, tool.name) for tools in CHOICES for tool in tools)
ASKED = (*((tools, None) for tools in CHOICES), *NAMED)
EVERY = 250


class RandomWeights:
    """Draw answers from random logits that favour closing tokens."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        self._tokenizer, self._filler = tokenizer, MaskFiller()
        self._service = service_of(tokenizer)
        self._asked: dict[tuple[str, int], ParsedRequest] = {}
        marks = tokenizer.reply_format.tokens.values()
        ends = (tokenizer.encode(one)[0] for one in CLOSING)
        self._closing = np.array([*ends, *marks, *tokenizer.eos_ids])
        self._end = tokenizer.encode_letters(end)

    def asked(self, api: str, number: int) -> ParsedRequest:
        """Return the request for a call of one of `ASKED`, translated anew once its grammar has worn."""
        key = (api, number)
        if key not in self._asked or grammar_of(self._asked[key]).worn:
            self._asked[key] = translated(api, forcing(api, *ASKED[number]), self._service)
        return self._asked[key]

    def outputs(
        self, grammar: CompiledGrammar, chance: np.random.Generator
    ) -> list[TokenOutput | FinishOutput]:
        """Return the outputs of one reply; it has no end if it is cut at `MAX_TOKENS`."""
        matcher, stream = grammar.matcher(), TextStream(self._tokenizer)
        end: list[int] = []
        told: list[TokenOutput | FinishOutput] = []
        while len(told) < MAX_TOKENS:
            self._filler.fill([(matcher, ())])
            mask = np.unpackbits(np.frombuffer(matcher.masks[0], dtype=np.uint8), bitorder="little")
            logits = chance.standard_normal(self._tokenizer.vocab_size)
            logits[self._closing] += 4
            if not end and chance.random() < 0.05:
                end = list(self._end)
            if end:
                logits[end.pop(0)] += 100
            token = int(np.argmax(np.where(mask[: logits.size], logits, -np.inf)))
            if token not in self._tokenizer.eos_ids:
                assert matcher.consume(token)
                told.append(TokenOutput(0, token, stream.push(token)))
                if not matcher.complete:
                    continue
            return [*told, FinishOutput(0, "stop", stream.finish())]
        return told


def draw(weights: RandomWeights, api: str, number: int, seed: int) -> Counter[str]:
    """Draw one whole reply to the request ``number``, check its calls, and return the counts."""
    counts: Counter[str] = Counter()
    chance = np.random.default_rng([seed, APIS.index(api)])
    for _ in range(MAX_DRAWS):
        asked = weights.asked(api, number)
        told = weights.outputs(grammar_of(asked), chance)
        if isinstance(told[-1], FinishOutput):
            break
        counts["cut"] += 1
    else:
        raise AssertionError(f"seed {seed} gave no whole reply in {MAX_DRAWS} draws")
    answer = builder(api, asked)
    for output in told:
        answer.add(0, output)
    calls = calls_in(api, answer)
    tools, name = ASKED[number]
    allowed = {name} if name else {tool.name for tool in tools}
    valid = all(called in allowed and VALIDATORS[called].is_valid(given) for called, given in calls)
    return counts + Counter({f"{api} replies": 1, f"{api} valid": bool(calls) and valid, "calls": len(calls)})


def grammar_of(asked: ParsedRequest) -> CompiledGrammar:
    grammar = asked.requests[0].grammar
    assert isinstance(grammar, CompiledGrammar)
    return grammar


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tokenizer]]:
    loaded: dict[str, Tokenizer] = {}

    def one(name: str) -> Tokenizer:
        if name not in loaded:
            loaded[name] = load_family(name, tmp_path_factory.mktemp("family"))
        return loaded[name]

    yield one
    for tokenizer in loaded.values():
        tokenizer.close()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", CALLING)
def test_forced_calls_are_valid(name: str, api: str, load: Callable[[str], Tokenizer]) -> None:
    weights = RandomWeights(load(name), ENDS.get(name, ""))
    counts: Counter[str] = Counter()
    # A call of any tool and one of a named tool. Other families and APIs take other tools.
    turn = CALLING.index(name) + APIS.index(api)
    for number in (turn % len(CHOICES), len(CHOICES) + turn % len(NAMED)):
        counts += draw(weights, api, number, seed=turn)
    assert counts[f"{api} valid"] == counts[f"{api} replies"] == 2


def main(start: int, num_seeds: int) -> None:
    """Draw one whole reply of each API for each seed from ``start`` on, and print the counts."""
    began_s = time.monotonic()
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        families = []
        for name in CALLING:
            tokenizer = load_family(name, Path(stack.enter_context(TemporaryDirectory())))
            stack.callback(tokenizer.close)
            families.append(RandomWeights(tokenizer, ENDS.get(name, "")))
        for seed in range(start, start + num_seeds):
            turn, index = divmod(seed, len(families))
            for api in APIS:
                counts += draw(families[index], api, turn % len(ASKED), seed)
            done = seed + 1 - start
            if done % EVERY == 0 or done == num_seeds:
                valid = ", ".join(f"{api} {counts[f'{api} valid']} of {done}" for api in APIS)
                more = f"{counts['calls']} calls, {counts['cut']} cut; {time.monotonic() - began_s:.0f} s"
                print(f"up to seed {seed}: {valid}; {more}", flush=True)
    # Nothing is left out: one invalid reply fails the run.
    sys.exit(any(counts[f"{api} valid"] != num_seeds for api in APIS))


if __name__ == "__main__":
    main(*([0, int(sys.argv[1])] if len(sys.argv) == 2 else map(int, sys.argv[1:3])))
