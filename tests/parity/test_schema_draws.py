"""Random answers by many schemas have the same bytes on one member, two, three and the forward layout.

Run as a program, it draws as many answers as its second argument says over the JSON-Schema-Test-Suite, with
guesses on and off, and prints how many differ. FOLDER is that of `model/constraints/json_schema_suite.py`:

    PYTHONPATH=tests python tests/parity/test_schema_draws.py FOLDER 500
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from convoy.engine.outputs import FinishOutput, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import RequestError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.constraints.matcher import CompiledGrammar
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.grammar import Grammar
from convoy.model.text.tokens import Tokenizer
from model.constraints.test_schemas import SCHEMAS
from parity.test_speculation import LAYOUTS, answers, running

COMPARED = {
    "one member": "alone",
    "two members": "default",
    "three members": "three, four steps in flight",
    "forward": "forward",
}
GUESSES: dict[str, dict[str, Any]] = {"off": {"jump_forward": False}, "on": {"speculate": 8}}
MAX_TOKENS = 40
AT_ONCE = 25
# The token ids, the text and the reason of one answer.
Said = tuple[tuple[int, ...], str, str]


def draws(source: ModelSource, schemas: list[Any], count: int, layout: str, guesses: str) -> list[Said]:
    """Return ``count`` answers: the schemas in turn, each with its own seed."""
    tokenizer = Tokenizer(source)
    compiler = GrammarCompiler(tokenizer)
    prompt = tuple(tokenizer.encode("The cat sat on the mat. The"))
    closing = {tokenizer.encode(one)[-1]: 3.0 for one in '"]}'}
    grammars = [one for schema in schemas if (one := _compiled(compiler, schema)) is not None]
    requests = [
        GenerationRequest(
            prompt,
            SamplingParams(temperature=1.2, seed=seed, logit_bias=closing),
            MAX_TOKENS,
            grammar=grammars[seed % len(grammars)],
        )
        for seed in range(count)
    ]
    spans, limits = LAYOUTS[COMPARED[layout]]
    said: list[Said] = []
    with running(source, spans, **{**limits, **GUESSES[guesses]}) as cluster:
        for start in range(0, count, AT_ONCE):
            for told in answers(cluster, requests[start : start + AT_ONCE]):
                last = told[-1]
                assert isinstance(last, FinishOutput)
                ids = tuple(one.token_id for one in told if isinstance(one, TokenOutput))
                text = "".join(one.text for one in told if isinstance(one, TokenOutput | FinishOutput))
                said.append((ids, text, last.reason))
        assert (cluster.engine.stats().accepted_tokens > 0) == (guesses == "on")
    return said


def _compiled(compiler: GrammarCompiler, schema: Any) -> CompiledGrammar | None:
    try:
        return compiler.compile(Grammar("json_schema", json.dumps(schema)), "schema")
    except RequestError:
        return None


@pytest.mark.long
def test_answers_by_many_schemas_are_the_same_on_the_forward_layout_with_guesses(demo: ModelSource) -> None:
    schemas = list(SCHEMAS.values())
    alone = draws(demo, schemas, len(schemas), "one member", "off")
    assert len({text for _, text, _ in alone}) > len(schemas) // 2
    assert draws(demo, schemas, len(schemas), "forward", "on") == alone


def main(folder: Path, count: int) -> None:
    """Draw on each layout, with guesses on and off, and print how many answers differ from the first."""
    cases = [case for path in sorted(folder.glob("*.json")) for case in json.loads(path.read_text("utf-8"))]
    source, schemas = ModelSource.resolve("demo"), [case["schema"] for case in cases]
    first: list[Said] = []
    for layout in COMPARED:
        for guesses in GUESSES:
            said = draws(source, schemas, count, layout, guesses)
            first = first or said
            differ = sum(one != other for one, other in zip(first, said, strict=True))
            whole = sum(reason == "stop" for _, _, reason in said)
            name = f"{layout}, guesses {guesses}"
            print(
                f"{name}: {len(said)} answers, {whole} whole, {differ} differ",
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
