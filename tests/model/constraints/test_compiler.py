"""Grammars are compiled within bounds of size, depth, time and memory, and refused by their field."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from convoy.errors import ConvoyError, QueueFull, RequestError
from convoy.model.constraints.compiler import GrammarCompiler, GrammarLimits
from convoy.model.constraints.deep_threads import DeepThreads
from convoy.model.constraints.matcher import AnswerLimits, MaskFiller, Matcher
from support.grammars import ByteVocabulary, compiled, grammar
from support.waiting import wait_until

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def accepts(matcher: Matcher, text: str) -> bool:
    """Return whether the whole of ``text`` matches."""
    data = list(text.encode())
    return matcher.allowed_start(data) == len(data) and all(map(matcher.consume, data)) and ended(matcher)


def ended(matcher: Matcher) -> bool:
    MaskFiller().fill([(matcher, ())])
    return has(matcher.masks[0], 256)


def has(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", '{"a": [1, null]}', "[1]"),
        ("json_schema", OBJECT, '{"name": "x", "age": 3}', '{"name": "x"}'),
        ("json_schema", {"type": "array", "items": {"enum": ["a", 1]}}, '["a", 1]', '["b"]'),
        ("json_schema", "true", '"anything"', "nothing"),
        ("regex", "^[a-c]+\\$$", "abc$", "abcd$"),
        ("regex", "a|bc", "bc", "c"),
        ("choice", ["yes", 'say "no"\n'], 'say "no"\n', "no"),
        ("lark", "start: DIGIT+\nDIGIT: /[0-9]/", "042", "x"),
        ("gbnf", 'root ::= "a" [0-9]+', "a17", "a"),
    ],
)
def test_an_answer_matches_the_whole_grammar(kind: Any, text: Any, good: str, bad: str) -> None:
    assert accepts(compiled(kind, text).matcher(), good)
    assert not accepts(compiled(kind, text).matcher(), bad)


def test_a_control_token_is_never_part_of_a_text() -> None:
    matcher = compiled("json_schema", {"type": "string"}).matcher()
    assert matcher.consume(ord('"'))
    MaskFiller().fill([(matcher, ())])
    assert not has(matcher.masks[0], 256)
    assert not has(matcher.masks[0], 257)
    assert has(matcher.masks[0], ord("<"))


def test_a_schema_with_a_keyword_that_cannot_be_enforced_is_refused_by_its_name() -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(
        RequestError, match="grammar has a keyword that cannot be enforced: uniqueItems"
    ) as caught:
        compiled("json_schema", schema)
    assert caught.value.param == "grammar"
    assert accepts(compiled("json_schema", schema, strict=False).matcher(), "[1, 1]")


def test_a_schema_cannot_set_the_options_of_the_compiler() -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match="uniqueItems"):
        compiled("json_schema", schema)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def exponential(size: int) -> dict[str, Any]:
    """Combine every choice of each part with every choice of the others: 4 ** size objects."""
    choices = [
        [{"type": "object", "properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(4)]
        for i in range(size)
    ]
    return {"allOf": [{"anyOf": choice} for choice in choices]}


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", deep(200), "nested deeper than 100 levels"),
        ("json_schema", "[" * 5000, "not valid JSON, or is nested too deeply"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[]", "expected an object"),
        ("json_schema", exponential(9), "cannot|that can be enforced"),
        ("json_schema", {"type": "strin"}, "that can be enforced"),
        ("json_schema", {"type": "string", "pattern": "("}, "that can be enforced"),
        ("json_schema", {"description": "x" * 300_000}, "bytes, and the limit is 262144"),
        ("json_schema", {"$ref": "http://localhost:1/schema.json"}, "that can be enforced"),
        ("json_schema", {"$ref": "file:///etc/hostname"}, "that can be enforced"),
        ("regex", "((((", "not a regular expression that can be enforced"),
        ("choice", [], "not a list of texts"),
        ("choice", [1], "not a list of texts"),
        ("choice", ["a"] * 5000, "has 5000 texts, and the limit is 4096"),
        ("lark", "start: missing", "not a grammar that can be enforced"),
        ("gbnf", "root ::= ((((", "not a GBNF grammar"),
    ],
)
def test_a_malformed_or_hostile_grammar_is_refused_and_names_its_field(
    kind: Any, text: Any, why: str
) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        compiled(kind, text)
    assert caught.value.param == "grammar"


def test_an_error_repeats_nothing_of_the_grammar() -> None:
    for kind, text in (
        ("regex", "SECRET((("),
        ("lark", "start: SECRET"),
        ("json_schema", {"type": "SECRET"}),
    ):
        with pytest.raises(RequestError) as caught:
            compiled(kind, text)  # type: ignore[arg-type]
        assert "SECRET" not in caught.value.message


PATTERN = {"type": "string", "pattern": "a?" * 3000}


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("regex", "a?" * 50_000, "grammar has 100000 bytes, and the limit is 4096"),
        ("lark", "start: " + '"a"? ' * 5000, "grammar has 25007 bytes, and the limit is 16384"),
        ("gbnf", "root ::= " + '"a"? ' * 5000, "grammar has 25009 bytes, and the limit is 16384"),
        ("json_schema", PATTERN, "all patterns in grammar has 6000 bytes, and the limit is 4096"),
        ("json_schema", {"items": [PATTERN]}, "all patterns in grammar has 6000 bytes"),
        ("json_schema", {"patternProperties": {"a?" * 3000: {}}}, "all patterns in grammar has 6000 bytes"),
        ("json_schema", deep(200), "nested deeper than 100 levels"),
        ("json_schema", {"description": "x" * 300_000}, "bytes, and the limit is 262144"),
    ],
)
def test_a_text_that_would_hold_its_place_for_long_is_not_compiled(kind: Any, text: Any, why: str) -> None:
    compiler = GrammarCompiler(ByteVocabulary())
    with pytest.raises(RequestError, match=why) as caught:
        compiler.check(grammar(kind, text), "grammar")
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("size", [10, 4000])
def test_a_long_chain_of_definitions_compiles(size: int) -> None:
    """The library follows it by recursion, and a usual stack has too little room for 4,000."""
    chain: dict[str, Any] = {
        f"r{index}": {"type": "array", "items": {"$ref": f"#/$defs/r{index + 1}"}} for index in range(size)
    }
    chain[f"r{size}"] = {"type": "null"}
    matcher = compiled("json_schema", {"$ref": "#/$defs/r0", "$defs": chain}).matcher()
    assert matcher.consume(ord("["))


class SlowVocabulary(ByteVocabulary):
    """Hold up the compiler where it asks for the tokens of a forced text."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go_on = threading.Event()

    def encode_letters(self, text: str) -> list[int]:
        self.asked.set()
        self.go_on.wait(30.0)
        return super().encode_letters(text)


class HeldThreads(DeepThreads):
    """Let calls be late once the vocabulary holds one up, whatever time that takes."""

    def __init__(self, vocabulary: SlowVocabulary) -> None:
        super().__init__(2, 2, 16 * 1024 * 1024, wait=self._wait_for)
        self._vocabulary = vocabulary
        self.patient = False

    def _wait_for(self, event: threading.Event, _timeout_s: float) -> bool:
        if self.patient:
            return event.wait(30.0)
        assert self._vocabulary.asked.wait(30.0)
        return event.is_set()


def test_a_grammar_that_takes_too_long_is_refused_and_keeps_its_callers_slot_until_it_ends() -> None:
    vocabulary = SlowVocabulary()
    threads = HeldThreads(vocabulary)
    compiler = GrammarCompiler(vocabulary, GrammarLimits(deadline_s=0.2), threads=threads)
    with pytest.raises(RequestError, match=r"regex takes longer than 0\.2 s to compile"):
        compiler.compile(grammar("regex", "forced"), "regex")
    with pytest.raises(QueueFull):
        compiler.compile(grammar("regex", "[ab]+"), "regex")
    threads.patient = True
    compiler.compile(grammar("regex", "[ab]+"), "regex", caller=b"another")
    vocabulary.go_on.set()


@pytest.mark.parametrize("text", ["forced", "forced("])
def test_requests_for_one_grammar_share_one_compilation_and_its_place(text: str) -> None:
    vocabulary, found = SlowVocabulary(), list[object]()
    threads = DeepThreads(2, 2, 16 * 1024 * 1024)
    compiler = GrammarCompiler(vocabulary, GrammarLimits(deadline_s=60), threads=threads)

    def ask(text: str) -> None:
        try:
            found.append(compiler.compile(grammar("regex", text), "regex"))
        except ConvoyError as error:
            found.append(str(error))

    asking = [threading.Thread(target=ask, args=(one,)) for one in ["held", *[text] * 16, "other"]]
    asking[0].start()
    assert vocabulary.asked.wait(30)
    for one in asking[1:-1]:
        one.start()
    wait_until(lambda: threads.num_waiting(b"") == 1)
    asking[-1].start()
    wait_until(lambda: threads.num_waiting(b"") == 2)
    vocabulary.go_on.set()
    for one in asking:
        one.join(60)
    assert len(found) == 18
    assert len(set(found)) == 3, "one outcome for each grammar"


def test_the_cache_keeps_the_last_used_grammars_within_their_price() -> None:
    one = grammar("regex", "a")
    price = GrammarCompiler(ByteVocabulary()).price(one)
    compiler = GrammarCompiler(ByteVocabulary(), GrammarLimits(max_cache_bytes=2 * price))
    first = compiler.compile(one, "regex")
    assert compiler.compile(one, "regex") is first
    assert compiler.cached_bytes == compiler.price(one)
    second = compiler.compile(grammar("regex", "b"), "regex")
    assert compiler.compile(one, "regex") is first
    compiler.compile(grammar("regex", "c"), "regex")
    assert compiler.cached_bytes == 2 * compiler.price(one)
    assert compiler.compile(one, "regex") is first
    assert compiler.compile(grammar("regex", "b"), "regex") is not second


def test_a_caller_with_many_grammars_displaces_its_own() -> None:
    one = grammar("regex", "a")
    price = GrammarCompiler(ByteVocabulary()).price(one)
    compiler = GrammarCompiler(ByteVocabulary(), GrammarLimits(max_cache_bytes=4 * price))
    kept = [compiler.compile(one, "regex", caller=caller) for caller in (b"a", b"b")]
    greedy = [compiler.compile(grammar("regex", text), "regex") for text in "cdefg"]
    assert compiler.cached_bytes == 4 * price
    assert [compiler.compile(one, "regex", caller=caller) for caller in (b"a", b"b")] == kept
    assert compiler.compile(grammar("regex", "g"), "regex") is greedy[-1]
    new = compiler.compile(one, "regex", caller=b"new")
    assert compiler.compile(one, "regex", caller=b"new") is new
    assert [compiler.compile(one, "regex", caller=caller) for caller in (b"a", b"b")] == kept


def test_a_grammar_that_is_larger_than_the_cache_is_not_kept() -> None:
    compiler = GrammarCompiler(ByteVocabulary(), GrammarLimits(max_cache_bytes=1000))
    compiler.compile(grammar("regex", "a"), "regex")
    assert compiler.cached_bytes == 0


def test_a_caller_gets_no_grammar_of_another() -> None:
    compiler, one = GrammarCompiler(ByteVocabulary()), grammar("regex", "a")
    assert compiler.compile(one, "regex", caller=b"b") is not compiler.compile(one, "regex", caller=b"a")


def test_users_behind_one_caller_share_its_place_and_no_grammar() -> None:
    vocabulary, one = SlowVocabulary(), grammar("regex", "a")
    threads = HeldThreads(vocabulary)
    compiler = GrammarCompiler(vocabulary, threads=threads)
    threads.patient = True
    vocabulary.go_on.set()
    first = compiler.compile(one, "regex", caller=b"key", owner=b"first")
    assert compiler.compile(one, "regex", caller=b"key", owner=b"second") is not first
    assert compiler.compile(one, "regex", caller=b"key", owner=b"first") is first
    vocabulary.go_on.clear()
    vocabulary.asked.clear()
    threads.patient = False
    with pytest.raises(RequestError, match="takes longer"):
        compiler.compile(grammar("regex", "forced"), "regex", caller=b"key", owner=b"first")
    with pytest.raises(QueueFull):
        compiler.compile(grammar("regex", "[ab]+"), "regex", caller=b"key", owner=b"second")
    vocabulary.go_on.set()


def test_a_grammar_is_compiled_anew_once_its_answers_have_worn_it() -> None:
    """All copies share one automaton, so a limit that one answer hits ends the later ones too."""
    limits = GrammarLimits(answer=AnswerLimits(shared_tokens=3))
    compiler, one = GrammarCompiler(ByteVocabulary(), limits), grammar("regex", "a*")
    first = compiler.compile(one, "regex")
    matcher = first.matcher()
    assert all(matcher.consume(ord("a")) for _ in range(2))
    assert compiler.compile(one, "regex") is first
    assert matcher.consume(ord("a"))
    second = compiler.compile(one, "regex")
    assert second is not first
    assert compiler.compile(one, "regex") is second
    assert compiler.cached_bytes == compiler.price(one)


def test_an_answer_that_hits_a_limit_does_not_end_the_answers_of_later_requests() -> None:
    compiler = GrammarCompiler(ByteVocabulary(), GrammarLimits(max_states=100))
    hungry = grammar("regex", "(.*a.{14}|.*b.{13}c.*|.*d.{15})")

    def num_tokens() -> int:
        matcher = compiler.compile(hungry, "regex").matcher()
        for number, token in enumerate(b"abcabdacabdacbdd"):
            MaskFiller().fill([(matcher, ())])
            if matcher.failed or not matcher.consume(token):
                return number
        return 16

    first = num_tokens()
    assert 0 < first < 16
    assert num_tokens() == first


def test_strict_and_lenient_forms_of_one_schema_are_cached_apart() -> None:
    compiler, text = GrammarCompiler(ByteVocabulary()), json.dumps({"type": "array", "uniqueItems": True})
    compiler.compile(grammar("json_schema", text, strict=False), "schema")
    with pytest.raises(RequestError):
        compiler.compile(grammar("json_schema", text), "schema")


def test_the_longest_choice_can_be_followed() -> None:
    texts = [f"{number:04} times" for number in range(GrammarLimits().max_choices)]
    assert accepts(compiled("choice", texts).matcher(), texts[-1])
