"""Read the fields that give an answer its form: OpenAI's, vLLM's newer and older ones, and llama.cpp's."""

from __future__ import annotations

from typing import Any

import msgspec

from convoy.errors import RequestError
from convoy.model.text.grammar import Grammar, GrammarKind

# A schema comes as an object or as its JSON text.
Schema = dict[str, Any] | bool | str


class FormatSchema(msgspec.Struct, frozen=True):
    """Hold the schema of OpenAI's ``response_format``. Only a strict one refuses unsupported keywords."""

    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Hold OpenAI's ``response_format``. llama.cpp's has a ``schema`` beside the type "json_object"."""

    type: str
    json_schema: FormatSchema | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """Hold vLLM's ``structured_outputs``, of which one field gives the form.

    The options that follow are known only to be refused, because they would change the answer.
    """

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class FormFields(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the fields of a body that give the answer its form. None always means: not given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # llama.cpp's: GBNF, and a schema.
    grammar: str | None = None
    json_schema: Schema | None = None


def read_form(body: FormFields) -> Grammar | None:
    """Return the grammar that a body asks for, or None. Raises `RequestError` for two of them."""
    found = [
        *_of_format(body.response_format),
        *_of_outputs(body.structured_outputs),
        *_schema(body.guided_json, "guided_json"),
        *_text("regex", body.guided_regex, "guided_regex"),
        *_choice(body.guided_choice, "guided_choice"),
        *_rules(body.guided_grammar, "guided_grammar"),
        *_text("gbnf", body.grammar or None, "grammar"),
        *_schema(body.json_schema, "json_schema"),
    ]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise RequestError(f"{first} and {second} both give the answer's form, expected one", param=second)
    return found[0] if found else None


def _of_format(given: ResponseFormat | None) -> list[Grammar]:
    where = "response_format"
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return _schema(given.schema, f"{where}.schema") or [Grammar("json_object", param=where)]
    if given.type != "json_schema":
        text = f"{where}.type is {given.type[:40]!r}, expected one of: text, json_object, json_schema"
        raise RequestError(text, param=f"{where}.type")
    schema = given.json_schema.schema if given.json_schema is not None else given.schema
    if schema is None:
        raise RequestError(f"{where}.json_schema.schema is missing", param=f"{where}.json_schema.schema")
    strict = given.json_schema is not None and bool(given.json_schema.strict)
    return _schema(schema, f"{where}.json_schema.schema", strict=strict, has_flag=True)


def _of_outputs(given: StructuredOutputs | None) -> list[Grammar]:
    where = "structured_outputs"
    if given is None:
        return []
    for name in ("disable_additional_properties", "whitespace_pattern", "structural_tag"):
        if getattr(given, name):
            raise RequestError(
                f"this server does not support {where}.{name}",
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
    return [
        *_schema(given.json, f"{where}.json"),
        *_text("regex", given.regex, f"{where}.regex"),
        *_choice(given.choice, f"{where}.choice"),
        *_rules(given.grammar, f"{where}.grammar"),
        *([Grammar("json_object", param=f"{where}.json_object")] if given.json_object else []),
    ]


def _schema(
    given: Schema | None, param: str, *, strict: bool = True, has_flag: bool = False
) -> list[Grammar]:
    if given is None:
        return []
    text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    return [Grammar("json_schema", text, strict, param, has_flag)]


def _choice(given: list[str] | None, param: str) -> list[Grammar]:
    return [] if given is None else [Grammar("choice", msgspec.json.encode(given).decode(), param=param)]


def _rules(given: str | None, param: str) -> list[Grammar]:
    # vLLM takes both notations in one field. Only GBNF writes its rules with these three characters.
    return _text("gbnf" if given is not None and "::=" in given else "lark", given, param)


def _text(kind: GrammarKind, given: str | None, param: str) -> list[Grammar]:
    return [] if given is None else [Grammar(kind, given, param=param)]
