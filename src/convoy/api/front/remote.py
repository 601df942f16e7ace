"""Stand for the engine in the front process: requests leave over the channel, and outputs come back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from convoy.api.front.channel import FrontChannel
from convoy.api.front.convert import RemoteGrammar, from_error, from_event, to_grammar, to_request
from convoy.api.front.families import decode_families
from convoy.api.service import ServedModel, ServedTokenizer, Service
from convoy.cluster.metrics.families import Metric
from convoy.engine.outputs import FinishOutput, Output, PromptOutput, TokenLogprob, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.requests.restrictions import check_ids
from convoy.errors import FrameTooLong, RequestError
from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.text.grammar import Grammar
from convoy.model.text.stop import TextStream
from convoy.wire.front import (
    Abort,
    Ask,
    BeginServing,
    CallReply,
    Compile,
    EngineState,
    ErrorEvent,
    FinishEvent,
    FromFront,
    FrontEvent,
    Outputs,
    PromptEvent,
    Pull,
    Question,
    Submit,
)

_health = msgspec.json.Decoder(tuple[bool, str])


@dataclass(slots=True)
class _Sink:
    """Hold where the outputs of a request go. ``unfinished`` counts its choices."""

    on_output: Callable[[Output], None]
    unfinished: int
    # Of a request without stop strings, the text of each choice is made here. None: the engine makes it.
    texts: list[TextStream] | None
    # The parts of the prompt's log-probabilities that came so far.
    prompt: list[TokenLogprob | None] = field(default_factory=list)

    def take(self, event: FrontEvent) -> None:
        """Pass an output on, once it is whole and has its text."""
        output = from_event(event)
        if isinstance(event, PromptEvent):
            assert isinstance(output, PromptOutput)
            self.prompt.extend(output.logprobs)
            if not event.is_last:
                return
            output = PromptOutput(tuple(self.prompt))
        elif self.texts is not None:
            output = _spelled(output, self.texts)
        self.on_output(output)


def _spelled(output: Output, texts: Sequence[TextStream]) -> Output:
    match output:
        case TokenOutput(choice, token_id, _, logprob):
            return TokenOutput(choice, token_id, texts[choice].push(token_id), logprob)
        case FinishOutput(choice, reason, _, cached_tokens, queued_s):
            return FinishOutput(choice, reason, texts[choice].finish(), cached_tokens, queued_s)
    return output


@dataclass(frozen=True, slots=True)
class RemoteHandle:
    """Refer to a request that runs in the engine's process."""

    channel: FrontChannel
    number: int

    def abort(self) -> None:
        """Ask the engine's process to end the request."""
        self.channel.send(Abort(self.number))


class RemoteEngine:
    """Send requests to the engine's process. Its replies and outputs come through `take`, on one thread."""

    def __init__(self, channel: FrontChannel, tokenizer: ServedTokenizer, serve: BeginServing) -> None:
        """Begin with the room and the level of ``serve``."""
        self._channel = channel
        self._tokenizer = tokenizer
        self._state = EngineState(serve.room, serve.level)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[bytes]] = {}
        self._sinks: dict[int, _Sink] = {}

    @property
    def room(self) -> int:
        """Return the tokens that one request may have, as the engine last told them."""
        return self._state.room

    def level(self) -> str:
        """Return the cluster's attestation level, as the engine last told it."""
        return self._state.level or ""

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None]) -> RemoteHandle:
        """Submit a request, and wait until the engine has admitted it. Raises as `Engine.submit` does."""
        # An id that no message can hold gets the answer that the engine gives.
        check_ids(request, self._tokenizer.eos_ids, self._tokenizer.vocab_size)
        own_text = not request.stop and not request.embeds
        number, count = next(self._numbers), request.num_choices
        texts = [TextStream(self._tokenizer) for _ in range(count)] if own_text else None
        message = Submit(number, to_request(request, tells_text=not own_text))
        with self._lock:
            self._sinks[number] = _Sink(on_output, count, texts)
        try:
            self._wait_for(number, message)
        except BaseException:
            with self._lock:
                self._sinks.pop(number, None)
            raise
        return RemoteHandle(self._channel, number)

    def compile(self, grammar: RemoteGrammar) -> None:
        """Let the engine's process compile a grammar. Raises as `GrammarCompiler.compile` does."""
        number = next(self._numbers)
        self._wait_for(number, Compile(number, to_grammar(grammar)))

    def ask(self, question: Question) -> bytes:
        """Return the answer to a question about the cluster, as JSON."""
        number = next(self._numbers)
        return self._wait_for(number, Ask(number, question))

    def pull(self, name: str) -> None:
        """Let the engine's process pull a model; with an empty name, let it stop. Raises `RequestError`."""
        number = next(self._numbers)
        self._wait_for(number, Pull(number, name))

    def take(self, message: EngineState | CallReply | Outputs) -> None:
        """Take a message of the engine's process, on the thread that reads the channel."""
        match message:
            case EngineState():
                self._state = message
            case CallReply(number, body, error):
                with self._lock:
                    call = self._calls.pop(number, None)
                if call is not None and error is None:
                    call.set_result(body)
                elif call is not None and error is not None:
                    call.set_exception(from_error(error))
            case Outputs(events):
                for event in events:
                    self._take_event(event)

    def _take_event(self, event: FrontEvent) -> None:
        with self._lock:
            sink = self._sinks.get(event.number)
        if sink is None:
            return
        sink.take(event)
        sink.unfinished -= isinstance(event, FinishEvent)
        if isinstance(event, ErrorEvent) or not sink.unfinished:
            with self._lock:
                self._sinks.pop(event.number, None)

    def _wait_for(self, number: int, message: FromFront) -> bytes:
        call: Future[bytes] = Future()
        with self._lock:
            self._calls[number] = call
        try:
            self._channel.send(message)
            return call.result()
        except FrameTooLong as error:
            raise RequestError(f"the request is too long: {error.message}") from None
        except (OverflowError, UnicodeError):
            raise RequestError("the request has a number or a text that no message can hold") from None
        finally:
            with self._lock:
                self._calls.pop(number, None)


class RemoteGrammars:
    """Check grammars here, and let the engine's process compile them."""

    def __init__(self, engine: RemoteEngine, tokenizer: ServedTokenizer) -> None:
        """Hold the limits that both processes have."""
        self._engine = engine
        self._checks = GrammarCompiler(tokenizer)

    def check(self, grammar: Grammar, param: str) -> None:
        """Raise `RequestError` for a caller's own text that is too long."""
        self._checks.check(grammar, param)

    def check_schema(self, schema: object, param: str) -> None:
        """Raise `RequestError` for a schema beyond the limits."""
        self._checks.check_schema(schema, param)

    def compile(
        self, grammar: Grammar, param: str, *, caller: bytes = b"", owner: bytes = b""
    ) -> RemoteGrammar:
        """Return the grammar of requests, once the engine's process has compiled it."""
        remote = RemoteGrammar(grammar, param, caller, owner)
        self._engine.compile(remote)
        return remote


@dataclass(frozen=True, slots=True)
class RemotePuller:
    """Let the engine's process pull models."""

    engine: RemoteEngine

    def start(self, name: str) -> None:
        """Begin a pull, as `Puller.start` does."""
        if not name:
            raise RequestError("no model is named")
        self.engine.pull(name)

    def stop(self) -> None:
        self.engine.pull("")


def remote_service(engine: RemoteEngine, tokenizer: ServedTokenizer, serve: BeginServing) -> Service:
    """Return the service of the front process."""
    grammars = RemoteGrammars(engine, tokenizer)

    def families() -> Iterator[Metric]:
        yield from decode_families(engine.ask("metrics"))

    return Service(
        (ServedModel(serve.model, engine, tokenizer, serve.created, grammars),),
        lambda: _health.decode(engine.ask("health")),
        lambda: msgspec.Raw(engine.ask("status")),
        None if serve.level is None else engine.level,
        (families,),
        puller=RemotePuller(engine),
    )
