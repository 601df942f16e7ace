"""Count how the JSON-Schema-Test-Suite fares: `python json_schema_suite.py FOLDER [NUM_DRAWS]`.

FOLDER is ``json/tests/draft2020-12`` of the suite, which the source distribution of jsonschema has:

    pip download --no-deps --no-binary jsonschema jsonschema && tar xf jsonschema-*.tar.gz

A schema that compiles strictly must accept each of the suite's valid instances and none of the others, when
they are written as the grammars write JSON. Random answers of all these schemas must be valid.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from convoy.errors import RequestError
from convoy.model.constraints.matcher import CompiledGrammar
from support.grammars import compiled, draw_answer

_MAX_TOKENS = 300


def count(folder: Path, num_draws: int) -> Counter[str]:
    """Return the counts of schemas, instances and draws."""
    counts: Counter[str] = Counter()
    grammars: list[tuple[dict[str, Any], CompiledGrammar]] = []
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text("utf-8")):
            schema = case["schema"]
            counts["schemas"] += 1
            try:
                grammar = compiled("json_schema", json.dumps(schema))
            except RequestError:
                continue
            counts["compiled"] += 1
            grammars.append((schema, grammar))
            for test in case["tests"]:
                accepted = _accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
                counts["valid"] += test["valid"]
                counts["invalid"] += not test["valid"]
                counts["valid refused"] += test["valid"] and not accepted
                counts["invalid accepted"] += accepted and not test["valid"]
    for number in range(num_draws if grammars else 0):
        schema, grammar = grammars[number % len(grammars)]
        text, whole = draw_answer(grammar, number, _MAX_TOKENS)
        counts["draws"] += 1
        counts["draws that end with length"] += not whole
        if whole:
            counts["draws that are invalid"] += not _is_valid(schema, text)
        else:
            data = list(text.encode())
            counts["cut draws that are no beginning"] += grammar.matcher().allowed_start(data) < len(data)
    return counts


def _accepts(grammar: CompiledGrammar, text: str) -> bool:
    tokens = [*text.encode(), 256]
    return grammar.matcher().allowed_start(tokens) == len(tokens)


def _is_valid(schema: Any, text: str) -> bool:
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))
    except (ValueError, RecursionError):
        return False


if __name__ == "__main__":
    for name, number in count(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000).items():
        print(f"{number:7} {name}")
