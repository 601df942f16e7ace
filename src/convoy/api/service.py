"""Describe the server's service: models with an engine each, and the cluster's health and status.

The server knows the engine and the tokenizer only through these protocols, so it needs neither torch nor a
cluster.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from convoy.api.model_switch import ModelSwitch
from convoy.api.refusals import UnknownModel
from convoy.cluster.metrics.families import Source
from convoy.engine.outputs import Output
from convoy.engine.requests.request import AnswerGrammar, GenerationRequest
from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.text.conversation import Conversation
from convoy.model.text.formats.registry import ReplyFormat
from convoy.model.text.grammar import Grammar


class Handle(Protocol):
    """Refer to a submitted request. `abort` may be called from any thread, and more than once."""

    def abort(self) -> None: ...


class ServedEngine(Protocol):
    """Declare the part of `convoy.engine.engine.Engine` that HTTP needs."""

    @property
    def room(self) -> int:
        """Return the tokens that one request may have now, prompt and answer together.

        Other stages may hold fewer tokens than this one.
        """

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None], /) -> Handle: ...


class ServedGrammars(Protocol):
    """Declare the part of `convoy.model.constraints.compiler.GrammarCompiler` that HTTP needs."""

    def check(self, grammar: Grammar, param: str, /) -> None:
        """Raise `RequestError` for a caller's own text that is too long."""

    def check_schema(self, schema: object, param: str, /) -> None:
        """Raise `RequestError` for a schema beyond the limits."""

    def compile(
        self, grammar: Grammar, param: str, /, *, caller: bytes = b"", owner: bytes = b""
    ) -> AnswerGrammar:
        """Return the grammar of requests. Raises `RequestError` and `QueueFull`."""


class ServedTokenizer(Protocol):
    """Declare the part of `convoy.model.text.tokens.Tokenizer` that HTTP needs. Several threads call it."""

    @property
    def eos_ids(self) -> Set[int]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_token_bytes(self) -> int | None:
        """Return the most bytes of text that one token stands for, or None if no bound is known."""

    @property
    def control_ids(self) -> Set[int]:
        """Return the tokens that are no text."""

    def encode_letters(self, text: str, /) -> list[int]:
        """Return the token ids of ``text`` inside another text, control strings as their letters."""

    def encode_word(self, text: str, /) -> list[int]: ...

    def encode(self, text: str, /, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of ``text``. Raises RequestError for more than ``max_tokens``.

        The check comes before the tokenizer runs if possible.
        """

    @property
    def reply_format(self) -> ReplyFormat:
        """Return the form in which the model writes reasoning and calls."""

    def encode_chat(self, chat: Conversation, /, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a conversation. Raises RequestError as `encode` does."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class Puller(Protocol):
    """Declare the part of `convoy.sdk.pull.ModelPuller` that HTTP needs. Both methods return soon."""

    def start(self, name: str, /) -> None:
        """Begin to pull a model of a hub onto every member. Raises `RequestError`."""

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Hold a model, the engine that runs it, and the compiler of grammars for its tokens.

    ``compiler`` None compiles them here.
    """

    name: str
    engine: ServedEngine
    tokenizer: ServedTokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    compiler: ServedGrammars | None = field(default=None, repr=False)
    grammars: ServedGrammars = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammars", self.compiler or GrammarCompiler(self.tokenizer))

    @property
    def max_context(self) -> int:
        """Return the most tokens of one request: the context, or the whole K/V pool if that is smaller."""
        return self.engine.room


@dataclass(frozen=True, slots=True)
class Service:
    """Hold the served models and the functions that describe the cluster.

    ``health`` returns (ready, reason), and ``status`` a value that msgspec can encode. Both may block for a
    moment. ``level`` returns the cluster's attestation level at once. ``metrics`` are called on a thread.
    ``switch`` loads the models that are not loaded; None if all always are. ``last_status`` is as ``status``,
    with measurements of before; None measures always. ``puller`` None pulls no models.
    """

    models: tuple[ServedModel, ...]
    health: Callable[[], tuple[bool, str]]
    status: Callable[[], Any]
    level: Callable[[], str] | None = None
    metrics: tuple[Source, ...] = ()
    switch: ModelSwitch | None = None
    last_status: Callable[[], Any] | None = None
    puller: Puller | None = None

    def hold(
        self, model: ServedModel, keep_alive_s: float | None = None, *, may_shorten: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Keep a model loaded inside the block, as `ModelSwitch.hold` does."""
        if self.switch is None:
            return nullcontext()
        return self.switch.hold(model.name, keep_alive_s, may_shorten=may_shorten)

    @asynccontextmanager
    async def unload(self, model: ServedModel) -> AsyncIterator[None]:
        """Begin the block once a model is unloaded, as `ModelSwitch.unload` does."""
        if self.switch is not None:
            await self.switch.unload(model.name)
        yield

    def is_loaded(self, model: ServedModel) -> bool:
        """Return whether a model is loaded."""
        return self.switch is None or self.switch.loaded == model.name

    def model(self, name: str | None) -> ServedModel:
        """Return the model with that name, or the only model for None. Raises `UnknownModel`."""
        if name is None and len(self.models) == 1:
            return self.models[0]
        for model in self.models:
            if model.name == name:
                return model
        served = ", ".join(model.name for model in self.models)
        raise UnknownModel(
            f"the model {name!r} is not served here, expected one of: {served}"
            if name is not None
            else f"the request names no model, expected one of: {served}",
            param="model",
            code="model_not_found",
        )
