"""Build the ASGI application: the table of paths and their endpoints."""

from __future__ import annotations

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from convoy.api.body.intake import Intake
from convoy.api.guard import Guard
from convoy.api.keys.failed_keys import FailedKeys
from convoy.api.keys.repeats import Repeats
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.answers import Health, ModelCard, ModelList
from convoy.api.openai.bodies import ChatBody, CompletionBody
from convoy.api.openai.chat_answer import ChatAnswer
from convoy.api.openai.completion_answer import CompletionAnswer
from convoy.api.openai.generate import Generate
from convoy.api.openai.parsed_request import read_chat, read_completion
from convoy.api.openai.tokenize import Tokenize, detokenize, tokenize
from convoy.api.service import ServedModel, Service
from convoy.api.telemetry.http_counts import HttpCounts
from convoy.api.telemetry.metrics import Metrics

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}"),
    *("/tokenize", "/detokenize", "/health", "/status", "/metrics"),
)


def make_app(service: Service, options: ServeOptions, lifecycle: Lifecycle | None = None) -> ASGIApp:
    """Return the ASGI application. Call it on the event loop's thread.

    ``lifecycle`` is that of the running server, so that endpoints see a drain.
    """
    life = lifecycle or Lifecycle()
    # Tokenising competes with the engine for the processor, so one intake bounds all endpoints together.
    intake = Intake(options)
    shared = (service, options, life, intake, Repeats())
    chat = Generate(*shared, ChatBody, read_chat, ChatAnswer)
    completion = Generate(*shared, CompletionBody, read_completion, CompletionAnswer)
    about = _About(service, life)
    counts, failed = HttpCounts(PATHS), FailedKeys()
    sources = (*service.metrics, counts.families, failed.families)
    metrics = Metrics(sources, life, None if options.keys is None else options.keys.families)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/tokenize", Tokenize(service, options, life, intake, tokenize), methods=["POST"]),
        Route("/detokenize", Tokenize(service, options, life, intake, detokenize), methods=["POST"]),
        Route("/v1/models", about.models),
        Route("/v1/models/{name:path}", about.model),
        Route("/health", about.health),
        Route("/status", about.status),
        Route("/metrics", metrics.answer),
    ]
    return counts.around(Guard(Router(routes, redirect_slashes=False), options, failed))


class _About:
    """Answer questions about the server itself: models, health and status."""

    def __init__(self, service: Service, lifecycle: Lifecycle) -> None:
        self._service = service
        self._lifecycle = lifecycle

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        return _json(ModelList([_card(model) for model in self._service.models]))

    async def model(self, request: Request) -> Response:
        return _json(_card(self._service.model(request.path_params["name"])))

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        if self._lifecycle.draining:
            return _json(Health("draining", "the server is shutting down"), 503)
        ready, reason = await anyio.to_thread.run_sync(self._service.health)
        level = None if self._service.level is None else self._service.level()
        return _json(Health("ready" if ready else "not ready", reason, level), 200 if ready else 503)

    async def status(self, request: Request) -> Response:  # noqa: ARG002
        return _json(await anyio.to_thread.run_sync(self._service.status))


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, max_model_len=model.max_context)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
