"""Compile grammars for one model, within bounds of time, size and memory.

A hostile grammar costs its own request: its text, its depth and its number of symbols are bounded before and
while it is compiled, and the caller waits no longer than the deadline. The library checks its own limits
again for each token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from collections.abc import Set as SetOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from convoy.errors import RequestError
from convoy.model.constraints.deep_threads import DeepThreads
from convoy.model.constraints.matcher import AnswerLimits, CompiledGrammar
from convoy.model.text.grammar import MAX_GRAMMAR_BYTES, Grammar, without_anchors

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

# The most memory of a grammar that is compiled once: at first, for each byte of its text, and for each state
# of its automaton. Seen at the limits: 22 MB for a text of 180 KB, and 1.1 KB for a state.
_BASE_BYTES = 256 * 1024
_BYTES_PER_TEXT_BYTE = 128
_BYTES_PER_STATE = 1280
# Address space only: pages that are never touched take no memory. A chain of rules takes 6 KB of it for each
# rule, which has at least 10 bytes of text.
_STACK_BYTES = 256 * 1024 * 1024
# A JSON text without free white space: a model cannot fill an answer with blanks, and more of it is forced.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_QUOTED = re.compile(r'"[^"]*"|\'[^\']*\'|`[^`]*`')
_DETAIL = re.compile(r":(?! *[0-9]+\)?$)[^:]*$")
_KEYWORD = re.compile(r"[$A-Za-z]{1,40}")


class GrammarVocabulary(Protocol):
    """Declare the part of `convoy.model.text.tokens.Tokenizer` that grammars need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> SetOf[int]: ...

    @property
    def control_ids(self) -> SetOf[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def encode_letters(self, text: str, /) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Hold the bounds on one grammar, and on the cache of all."""

    max_text_bytes: int = MAX_GRAMMAR_BYTES
    # Of a regular expression, and of all patterns in a JSON schema. The work grows with the square of the
    # length: 4 KiB of optional `\w` take a second, and 50,000 optional letters most of a minute.
    max_regex_bytes: int = 4096
    # Of a caller's text in Lark's notation or in GBNF, for the same reason.
    max_rules_bytes: int = 16 * 1024
    # Of lists and objects inside each other in a JSON schema.
    max_depth: int = 100
    max_symbols: int = 50_000
    max_choices: int = 4096
    # Of the library's automaton. A text of bounded length takes 9 for each of its characters.
    max_states: int = 10_000
    # Of the automaton that follows guesses.
    max_guess_states: int = 2_500
    # Of the parser for one mask. 1,000 letters in a row take 50,000 with 128,000 tokens, in 4 ms.
    max_mask_items: int = 100_000
    # Of the parser at one place: each choice is one, and a property that may come next takes four.
    max_row_items: int = 5_000
    deadline_s: float = 2.0
    # Grammars that are compiled at once, one for each caller.
    max_compiling: int = 2
    # Of one caller. Each holds a thread that reads bodies.
    max_waiting: int = 2
    max_cache_bytes: int = 256 * 1024 * 1024
    answer: AnswerLimits = field(default_factory=AnswerLimits)


@dataclass(frozen=True, slots=True)
class _Cached:
    """Hold a grammar with its owner and its price."""

    compiled: CompiledGrammar
    caller: bytes
    num_bytes: int


class GrammarCompiler:
    """Compile grammars for one model's tokens, and cache the last used ones. Thread-safe."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        limits: GrammarLimits | None = None,
        *,
        threads: DeepThreads | None = None,
    ) -> None:
        """Begin with an empty cache. ``threads`` run the library; the default ones keep ``limits``."""
        self._vocabulary = vocabulary
        self._limits = limits or GrammarLimits()
        self._tokens: LLTokenizer | None = None
        # The last used grammar comes last.
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        # The grammars that are being compiled, by their keys and the fields that their errors name.
        self._in_flight: dict[tuple[bytes, str], Future[CompiledGrammar]] = {}
        self.cached_bytes = 0
        self._lock = threading.Lock()
        self._making_tokens = threading.Lock()
        self._threads = threads or DeepThreads(
            self._limits.max_compiling, self._limits.max_waiting, _STACK_BYTES
        )

    def compile(
        self, grammar: Grammar, param: str, *, caller: bytes = b"", owner: bytes = b""
    ) -> CompiledGrammar:
        """Return the compiled grammar; ``param`` names the request's field for errors.

        One ``caller`` has one grammar compiled at a time, and ``owner`` separates the users behind it. No
        other caller or owner gets the same grammar or can tell that it was compiled. Requests for one that is
        being compiled wait for it and share its outcome. Raises `RequestError` for a grammar that is
        malformed, unsupported or beyond a limit, and `QueueFull` if too many others are being compiled.
        """
        num_bytes = _num_bytes(grammar.text)
        _check_size(num_bytes, self._limits.max_text_bytes, param)
        key = _key(grammar, caller, owner)
        with self._lock:
            if key in self._cache and not self._cache[key].compiled.worn:
                self._cache.move_to_end(key)
                return self._cache[key].compiled
            in_flight = self._in_flight.get((key, param))
            own = Future[CompiledGrammar]()
            if in_flight is None:
                self._in_flight[key, param] = own
        if in_flight is not None:
            # The deadline of the request that compiles it bounds this wait too.
            return in_flight.result()
        try:
            compiled = self._run(grammar, param, caller)
            self._keep(key, _Cached(compiled, caller, self.price(grammar)))
            own.set_result(compiled)
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._in_flight[key, param]
        return compiled

    def _run(self, grammar: Grammar, param: str, caller: bytes) -> CompiledGrammar:
        """Compile on a thread with a deep stack, within the deadline."""
        # The deadline begins behind this: it is made once for the model, in a second for a large vocabulary.
        tokens = self._tokenizer()
        try:
            return self._threads.run(
                caller, lambda: self._compile(tokens, grammar, param), self._limits.deadline_s
            )
        except TimeoutError:
            raise RequestError(
                f"{param} takes longer than {self._limits.deadline_s:g} s to compile",
                param=param,
                hint="use a simpler grammar",
            ) from None

    def price(self, grammar: Grammar) -> int:
        """Return the most bytes of memory that a grammar takes once it is compiled, with all its answers."""
        states = self._limits.max_states + self._limits.max_guess_states
        fixed = _BASE_BYTES + _BYTES_PER_TEXT_BYTE * _num_bytes(grammar.text)
        return 2 * fixed + states * _BYTES_PER_STATE

    def check(self, grammar: Grammar, param: str) -> None:
        """Raise `RequestError` if a caller's own text has more bytes than its kind may have.

        The texts that this server makes itself, around schemas that were checked, may be longer.
        """
        most = self._limits.max_text_bytes
        if grammar.kind == "json_schema":
            _check_size(_num_bytes(grammar.text), most, param)
            self.check_schema(_loads(grammar.text, param), param)
            return
        if grammar.kind == "regex":
            most = self._limits.max_regex_bytes
        elif grammar.kind in {"lark", "gbnf"}:
            most = self._limits.max_rules_bytes
        _check_size(_num_bytes(grammar.text), most, param)

    def check_schema(self, schema: object, param: str) -> None:
        """Raise `RequestError` if the regular expressions in ``schema``, or its levels, are too many."""
        _check_depth(schema, self._limits.max_depth, param)
        num_bytes = sum(_num_bytes(pattern) for pattern in _patterns(schema))
        _check_size(num_bytes, self._limits.max_regex_bytes, f"the text of all patterns in {param}", param)

    def _keep(self, key: bytes, new: _Cached) -> None:
        """Put ``new`` into the cache. Its room comes from the caller with the most bytes.

        So a caller with many grammars displaces its own.
        """
        if new.num_bytes > self._limits.max_cache_bytes:
            return
        with self._lock:
            if key in self._cache:
                # A worn one is replaced.
                self.cached_bytes -= self._cache.pop(key).num_bytes
            while self.cached_bytes + new.num_bytes > self._limits.max_cache_bytes:
                self.cached_bytes -= self._cache.pop(self._next_out(new)).num_bytes
            self._cache[key] = new
            self.cached_bytes += new.num_bytes

    def _next_out(self, new: _Cached) -> bytes:
        """Return the key of the longest unused grammar of the caller with the most bytes, with ``new``."""
        held = Counter({new.caller: new.num_bytes})
        for one in self._cache.values():
            held[one.caller] += one.num_bytes
        return max(self._cache, key=lambda key: held[self._cache[key].caller])

    def _compile(self, tokens: LLTokenizer, grammar: Grammar, param: str) -> CompiledGrammar:
        from llguidance import LLMatcher

        source, limits = self._source(grammar, param), self._limits
        native = LLMatcher(tokens, source, log_level=0, limits=_native_limits(limits, limits.max_states))
        if not native.is_error():
            # The first mask finds what only a walk through the vocabulary shows, and warms all copies.
            native.compute_bitmask()
        if native.is_error():
            raise _refused(grammar, native.get_error(), param)
        few = _native_limits(limits, limits.max_guess_states)
        guesser = LLMatcher(tokens, source, log_level=0, limits=few)
        return CompiledGrammar(native, guesser, self._vocabulary.vocab_size, limits.answer)

    def _source(self, grammar: Grammar, param: str) -> str:
        from llguidance import LLMatcher

        match grammar.kind:
            case "json_object":
                return _of_schema({"type": "object"}, strict=True)
            case "json_schema":
                return _of_schema(self._schema(grammar.text, param), strict=grammar.strict)
            case "regex":
                return LLMatcher.grammar_from_regex(without_anchors(grammar.text))
            case "choice":
                return LLMatcher.grammar_from_lark(self._choices(grammar.text, param))
            case "lark":
                return LLMatcher.grammar_from_lark(grammar.text)
            case "gbnf":
                return LLMatcher.grammar_from_lark(_lark_of_gbnf(grammar.text, param))

    def _schema(self, text: str, param: str) -> Any:
        schema = _loads(text, param)
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{param} is not a JSON schema, expected an object", param=param)
        if isinstance(schema, bool):
            return {} if schema else {"not": {}}
        _check_depth(schema, self._limits.max_depth, param)
        # Options of the compiler are the server's.
        return {name: value for name, value in schema.items() if name != "x-guidance"}

    def _choices(self, text: str, param: str) -> str:
        choices = _loads(text, param)
        if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
            raise RequestError(f"{param} is not a list of texts, expected at least one", param=param)
        if len(choices) > self._limits.max_choices:
            text = f"{param} has {len(choices)} texts, and the limit is {self._limits.max_choices}"
            raise RequestError(text, param=param)
        return "start: " + " | ".join(json.dumps(one) for one in choices)

    def _tokenizer(self) -> LLTokenizer:
        with self._making_tokens:
            if not self._vocabulary.eos_ids:
                raise RequestError("this model has no end-of-text token, so no grammar can end its answer")
            if self._tokens is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                wrapped = TokenizerWrapper(_Tokens(self._vocabulary))
                self._tokens = LLTokenizer(wrapped, eos_token=sorted(self._vocabulary.eos_ids))
            return self._tokens


class _Tokens:
    """Give the library the vocabulary in its own form: the bytes of each id, and which ids are special."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None
        self.special_token_ids = sorted(
            one for one in vocabulary.control_ids | vocabulary.eos_ids if one < vocabulary.vocab_size
        )
        self.tokens = [vocabulary.token_bytes(one) for one in range(vocabulary.vocab_size)]
        self._encode = vocabulary.encode_letters

    def __call__(self, text: str) -> list[int]:
        """Return the ids of text inside an answer."""
        if not isinstance(text, str):
            # The library tries bytes once, and then gives text.
            raise TypeError("expected text")
        return self._encode(text)


def _native_limits(limits: GrammarLimits, max_states: int) -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=limits.max_symbols,
        max_lexer_states=max_states,
        step_max_items=limits.max_mask_items,
        max_items_in_row=limits.max_row_items,
        # Its longer texts repeat the grammar and the answer.
        verbose_errors=False,
    )


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _check_size(num_bytes: int, most: int, name: str, param: str | None = None) -> None:
    if num_bytes > most:
        raise RequestError(f"{name} has {num_bytes} bytes, and the limit is {most}", param=param or name)


def _patterns(schema: object) -> Iterator[str]:
    """Yield the regular expressions of a JSON schema. Its depth must be bounded."""
    if isinstance(schema, list):
        for one in schema:
            yield from _patterns(one)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name == "pattern" and isinstance(value, str):
                yield value
            elif name == "patternProperties" and isinstance(value, dict):
                yield from value
            yield from _patterns(value)


def _key(grammar: Grammar, caller: bytes, owner: bytes) -> bytes:
    parts = f"{grammar.kind}\0{grammar.strict}\0{caller.hex()}\0{owner.hex()}\0{grammar.text}"
    return hashlib.sha256(parts.encode(errors="surrogatepass")).digest()


def _of_schema(schema: Any, *, strict: bool) -> str:
    from llguidance import LLMatcher

    overrides: Any = {**_JSON, "lenient": not strict}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)


def _lark_of_gbnf(text: str, param: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    # The library's translator raises any exception at all for a malformed grammar.
    except Exception:  # noqa: BLE001
        raise RequestError(f"{param} is not a GBNF grammar", param=param) from None


def _loads(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(f"{param} is not valid JSON, or is nested too deeply", param=param) from None


def _check_depth(value: object, most: int, param: str) -> None:
    level: Sequence[object] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > most:
            raise RequestError(f"{param} is nested deeper than {most} levels", param=param)
        inner: list[object] = []
        for one in level:
            children = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            inner += [child for child in children if isinstance(child, dict | list)]
        level = inner


def _refused(grammar: Grammar, reason: str, param: str) -> RequestError:
    """Return the error for a grammar that the library refuses. It repeats no text but known keywords."""
    found = _UNSUPPORTED.search(reason)
    if found:
        keywords = ", ".join(_KEYWORD.findall(found[1])[:8])
        return RequestError(
            f"{param} has a keyword that cannot be enforced: {keywords}",
            param=param,
            code="unsupported_schema",
            hint='leave it out, or set "strict" to false' if grammar.has_flag else "leave it out",
        )
    what = {"json_schema": "JSON schema", "json_object": "JSON schema", "regex": "regular expression"}
    name = what.get(grammar.kind, "grammar")
    # Names of the grammar stand between quotation marks, or behind the last colon.
    reason = _QUOTED.sub("…", reason.splitlines()[0])
    reason = _DETAIL.sub("", reason)[:200]
    return RequestError(f"{param} is not a {name} that can be enforced: {reason}", param=param)
