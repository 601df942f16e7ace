"""A client of a running server over HTTP: ask it, stream from it, and read its status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import msgspec

from convoy.api.openai.answers import ChatCompletion, TextCompletion, TokenUsage
from convoy.config.type_resolution import resolved
from convoy.errors import UsageError
from convoy.sdk.endpoint import Endpoint

if TYPE_CHECKING:
    from convoy.cluster.status import ClusterStatus

Message = Mapping[str, Any]
Answer = TypeVar("Answer", ChatCompletion, TextCompletion)
# Names that an error lists.
_MAX_NAMES = 10


class Sampling(TypedDict, total=False):
    """Describe the optional parameters of a request, as in the HTTP API; without them its defaults count."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """Hold a whole answer. ``finish_reason`` is "stop", or "length" where ``max_tokens`` cut it off."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class Client:
    """Call one server. Several threads may use it, and it keeps no connection open.

    Every method raises `HttpRefused` for an error answer (its subclass `ServerBusy` if another try may
    succeed), `PeerUnreachable` if no server answers, and `Incompatible` if it is no Convoy.
    """

    def __init__(
        self, url: str, *, key: str | None = None, ca: str | Path | None = None, timeout_s: float = 600.0
    ) -> None:
        """Check the address; see `connect`."""
        authorities = None if ca is None else Path(ca)
        self._endpoint = Endpoint.of(
            *(url, key, authorities, timeout_s),
            server="server",
            url_option="url",
            ca_option="ca",
            key_hint="give the API key: convoy.connect(url, key=...)",
        )
        self._model: str | None = None

    @property
    def url(self) -> str:
        """Return the server's address, without ``/v1``."""
        return self._endpoint.url

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that are served."""
        return list_models(self._endpoint)

    def chat(
        self, messages: str | Sequence[Message], *, model: str | None = None, **sampling: Unpack[Sampling]
    ) -> Reply:
        """Return the answer to a conversation, or to one question given as text."""
        asked = {"messages": _conversation(messages), "model": self._named(model), **sampling}
        found = self._post("/v1/chat/completions", asked, ChatCompletion)
        return _reply(found.choices[0].message.content or "", found.choices[0].finish_reason, found.usage)

    def generate(
        self, prompt: str | Sequence[int], *, model: str | None = None, **sampling: Unpack[Sampling]
    ) -> Reply:
        """Return the continuation of a text or of token ids, without a chat template."""
        wanted = prompt if isinstance(prompt, str) else list(prompt)
        asked = {"prompt": wanted, "model": self._named(model), **sampling}
        found = self._post("/v1/completions", asked, TextCompletion)
        return _reply(found.choices[0].text, found.choices[0].finish_reason, found.usage)

    def stream(
        self, messages: str | Sequence[Message], *, model: str | None = None, **sampling: Unpack[Sampling]
    ) -> Iterator[str]:
        """Yield the pieces of `chat`'s answer as they come. To stop early, close the iterator."""
        body = {"messages": _conversation(messages), "model": self._named(model), "stream": True, **sampling}
        for event in self._endpoint.stream("/v1/chat/completions", body):
            for choice in event.get("choices") or ():  # type: ignore[attr-defined]
                if piece := choice["delta"].get("content"):
                    yield piece

    def status(self) -> ClusterStatus:
        """Return the members, their layers and links, the load, and whether tokens pass every stage."""
        return cluster_status(self._endpoint)

    def _post(self, path: str, asked: object, kind: type[Answer]) -> Answer:
        """Return the answer as ``kind``, with at least one choice."""
        answer = self._endpoint.post(path, asked)
        try:
            found = msgspec.convert(answer, resolved(kind))
        except msgspec.ValidationError as error:
            raise self._endpoint.not_ours(f"its answer is of another shape: {error}") from None
        if not found.choices:
            raise self._endpoint.not_ours("its answer has no choice")
        return found

    def _named(self, model: str | None) -> str:
        if model is None and self._model is None:
            self._model = only_model(self._endpoint, "the argument model")
        return model or self._model or ""


def connect(
    url: str, *, key: str | None = None, ca: str | Path | None = None, timeout_s: float = 600.0
) -> Client:
    """Return a client of the head, coordinator or proxy at ``url``, with or without ``/v1``.

    ``key`` is the API key, if the server demands one. ``ca`` is a PEM file with the only certificates to
    trust for https; without it the system's count. ``timeout_s`` bounds each wait for data. Nothing is sent
    yet. Raises `UsageError` for a wrong address, and `ConfigError` for a file without certificates.
    """
    return Client(url, key=key, ca=ca, timeout_s=timeout_s)


def _conversation(messages: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _reply(text: str, finish_reason: str | None, usage: object) -> Reply:
    counted = usage if isinstance(usage, TokenUsage) else None
    num_prompt, num_answer = (counted.prompt_tokens, counted.completion_tokens) if counted else (0, 0)
    return Reply(text, finish_reason or "", num_prompt, num_answer)


def list_models(endpoint: Endpoint) -> tuple[str, ...]:
    """Return the names of the served models. Raises the errors of `Endpoint.get`."""
    listed = endpoint.get("/v1/models")
    try:
        return tuple(str(one["id"]) for one in listed["data"])  # type: ignore[index]
    except (TypeError, KeyError):
        raise endpoint.not_ours("no list of models") from None


def only_model(endpoint: Endpoint, option: str) -> str:
    """Return the name of the only model served. A coordinator and a proxy need the name in each request.

    Raises `UsageError` if there is no model, or more than one; the hint names ``option``.
    """
    names = list_models(endpoint)
    if len(names) == 1:
        return names[0]
    # The names come from a server, and must not draw on a terminal.
    listed = ", ".join(names[:_MAX_NAMES])
    shown = "".join(char if char.isprintable() else " " for char in listed).strip()
    raise UsageError(
        f"{endpoint.url} serves {len(names)} models" + (f": {shown}" if names else ""),
        hint=f"{option} names one" if names else "ask again once it serves one",
    )


def cluster_status(endpoint: Endpoint) -> ClusterStatus:
    """Return the body of ``GET /status``. Raises `Incompatible` if it has another shape."""
    return status_of(endpoint, endpoint.get("/status"))


def status_of(endpoint: Endpoint, answer: object) -> ClusterStatus:
    """Return a body or an event of `GET /status`.

    Raises `UsageError` for that of a coordinator, and `Incompatible` if it has another shape.
    """
    from convoy.cluster.status import ClusterStatus

    if isinstance(answer, dict) and "offered" in answer:
        raise UsageError(
            f"{endpoint.url} is a coordinator, and this command shows the members of a head",
            hint=f"`convoy top --url {endpoint.url}`, or its page: `convoy open --url {endpoint.url}`",
        )
    try:
        # The server may be of another version, or no Convoy at all.
        return msgspec.convert(answer, resolved(ClusterStatus))
    except msgspec.ValidationError as error:
        raise endpoint.not_ours(f"its status is of another shape: {error}") from None
