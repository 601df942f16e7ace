"""What the HTTP server serves: models behind an engine each, and two questions about the cluster.

The server knows the engine and the tokenizer by these protocols alone, so it needs neither torch nor a
cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from convoy.api.refusals import UnknownModel
from convoy.cluster.metrics.families import Source
from convoy.engine.outputs import Output
from convoy.engine.requests.request import GenerationRequest


class Handle(Protocol):
    """A submitted request. `abort` may be called from any thread, more than once."""

    def abort(self) -> None: ...


class ServedEngine(Protocol):
    """`convoy.engine.engine.Engine`, as far as HTTP needs it."""

    @property
    def room(self) -> int:
        """How many tokens one request may have with its answer, now: other stages may hold fewer."""

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None], /) -> Handle: ...


class ServedTokenizer(Protocol):
    """`convoy.model.text.tokens.Tokenizer`, as far as HTTP needs it; called from several threads."""

    @property
    def eos_ids(self) -> Set[int]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_token_bytes(self) -> int | None:
        """The most bytes of text that one token stands for, or None where no bound is known."""

    def encode_word(self, text: str, /) -> list[int]: ...

    def encode(self, text: str, /, *, max_tokens: int | None = None) -> list[int]:
        """Raises RequestError for more than ``max_tokens``, at best before it is tokenised."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], /, *, max_tokens: int | None = None
    ) -> list[int]:
        """Raises RequestError as `encode` does."""

    def decode(self, ids: Sequence[int], /) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the engine that runs it."""

    name: str
    engine: ServedEngine
    tokenizer: ServedTokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_context(self) -> int:
        """What one request may use, in tokens: the context, or the whole K/V pool where that is smaller."""
        return self.engine.room


@dataclass(frozen=True, slots=True)
class Service:
    """``health`` gives (ready, reason); ``status`` a value that msgspec can encode. Both may block for a
    moment. ``level`` gives the cluster's level of attestation, at once. ``metrics`` are asked on a thread.
    """

    models: tuple[ServedModel, ...]
    health: Callable[[], tuple[bool, str]]
    status: Callable[[], Any]
    level: Callable[[], str] | None = None
    metrics: tuple[Source, ...] = ()

    def model(self, name: str | None) -> ServedModel:
        """The model of that name, or the only one when a request names none. Raises `UnknownModel`."""
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
