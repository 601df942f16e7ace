"""Whatever a model with random weights answers, it is valid by the schema, or the beginning of an answer."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from support.grammars import compiled, draw_answer

_POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "types": {"type": ["string", "null", "boolean"]},
    "enum": {"enum": ["red", 3, None, {"a": [1]}]},
    "const": {"const": {"kind": "point", "at": [0, 1]}},
    "point": _POINT,
    "optional": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "bounds": {"type": "integer", "minimum": -5, "maximum": 1234},
    "open bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-z]+-[0-9]{2,4}$"},
    "date": {"type": "string", "format": "date"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string"}],
        "items": False,
        "minItems": 2,
    },
    "any of": {"anyOf": [_POINT, {"type": "string", "maxLength": 3}, {"type": "null"}]},
    "all of": {"allOf": [_POINT, {"type": "object", "properties": {"x": {"minimum": 3}}}]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "names": {
        "type": "object",
        "patternProperties": {"^s_": {"type": "string"}},
        "additionalProperties": False,
    },
    "reference": {"$ref": "#/$defs/p", "$defs": {"p": _POINT}},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    },
    "call": {
        "type": "object",
        "properties": {
            "name": {"const": "read_file"},
            "arguments": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
}
_SEEDS = range(12)


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_valid_or_a_beginning_of_one(name: str) -> None:
    schema = SCHEMAS[name]
    grammar = compiled("json_schema", schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    num_whole = 0
    for seed in _SEEDS:
        text, whole = draw_answer(grammar, seed, max_tokens=400)
        num_whole += whole
        if whole:
            validator.validate(json.loads(text))
        else:
            data = list(text.encode())
            assert grammar.matcher().allowed_start(data) == len(data)
    assert num_whole > len(_SEEDS) // 2, "closing tokens are favoured"


@pytest.mark.parametrize("max_tokens", [1, 5, 17])
def test_an_answer_that_was_cut_is_a_beginning(max_tokens: int) -> None:
    grammar = compiled("json_schema", SCHEMAS["call"])
    for seed in _SEEDS:
        text, whole = draw_answer(grammar, seed, max_tokens)
        assert not whole
        data = list(text.encode())
        assert grammar.matcher().allowed_start(data) == len(data)
