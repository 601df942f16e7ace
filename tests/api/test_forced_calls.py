"""Whatever random weights draw, a forced call is valid by its tool's schema, on all three APIs.

Each reply is drawn once, from the grammar of one API, and read by all three: their grammars allow the same.
Run as a program, it draws as many whole replies as its argument says and prints the counts:

    PYTHONPATH=tests python tests/api/test_forced_calls.py 10000
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
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


class RandomWeights:
    """Draw answers from random logits that favour closing tokens."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        self._tokenizer, self._filler = tokenizer, MaskFiller()
        self._service = service_of(tokenizer)
        self._asked: dict[tuple[str, int, str | None], ParsedRequest] = {}
        marks = tokenizer.reply_format.tokens.values()
        self._closing = [*(tokenizer.encode(one)[0] for one in CLOSING), *marks, *tokenizer.eos_ids]
        self._end = tokenizer.encode_letters(end)

    def asked(self, api: str, number: int, name: str | None) -> ParsedRequest:
        """Return the request for a call of one of `CHOICES`, translated anew once its grammar has worn."""
        key = (api, number, name)
        if key not in self._asked or grammar_of(self._asked[key]).worn:
            self._asked[key] = translated(api, forcing(api, CHOICES[number], name), self._service)
        return self._asked[key]

    def outputs(self, grammar: CompiledGrammar, seed: int) -> list[TokenOutput | FinishOutput]:
        """Return the outputs of one reply; it has no end if it is cut at `MAX_TOKENS`."""
        chance, matcher, stream = np.random.default_rng(seed), grammar.matcher(), TextStream(self._tokenizer)
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


def draw(weights: RandomWeights, seed: int) -> Counter[str]:
    """Draw one reply and check its calls in each API; return the counts."""
    chance = random.Random(seed)
    number = chance.randrange(len(CHOICES))
    tools = CHOICES[number]
    name = chance.choice(tools).name if chance.random() < 0.5 else None
    asked = {api: weights.asked(api, number, name) for api in APIS}
    told = weights.outputs(grammar_of(asked["chat"]), seed)
    if isinstance(told[-1], TokenOutput):
        return Counter(cut=1)
    ids = [one.token_id for one in told if isinstance(one, TokenOutput)]
    known = {tool.name: tool.parameters for tool in tools}
    counts = Counter(replies=1, named=name is not None)
    for api in APIS:
        assert grammar_of(asked[api]).matcher().allowed_start(ids) == len(ids)
        answer = builder(api, asked[api])
        for output in told:
            answer.add(0, output)
        calls = calls_in(api, answer)
        counts[api] += bool(calls) and all(
            called in ({name} if name else known)
            and jsonschema.Draft202012Validator(known[called]).is_valid(arguments)
            for called, arguments in calls
        )
        counts[f"{api} calls"] += len(calls)
    return counts


def grammar_of(asked: ParsedRequest) -> CompiledGrammar:
    grammar = asked.requests[0].grammar
    assert grammar is not None
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


@pytest.mark.parametrize("name", CALLING)
def test_forced_calls_are_valid(name: str, load: Callable[[str], Tokenizer]) -> None:
    tokenizer = load(name)
    weights = RandomWeights(tokenizer, ENDS.get(name, ""))
    counts: Counter[str] = Counter()
    for seed in range(6):
        counts += draw(weights, seed)
    assert counts["chat"] == counts["messages"] == counts["responses"] == counts["replies"] > 0


def main(num_replies: int) -> None:
    """Draw whole replies, as many from each family, and print the counts."""
    total: Counter[str] = Counter()
    for index, name in enumerate(CALLING):
        with TemporaryDirectory() as directory:
            tokenizer = load_family(name, Path(directory))
            weights = RandomWeights(tokenizer, ENDS.get(name, ""))
            wanted = num_replies * (index + 1) // len(CALLING) - num_replies * index // len(CALLING)
            counts: Counter[str] = Counter()
            seed = 0
            while counts["replies"] < wanted:
                counts += draw(weights, seed)
                seed += 1
            tokenizer.close()
        print(f"{name:13} {dict(counts)}", flush=True)
        total += counts
    print(f"{'all':13} {dict(total)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
