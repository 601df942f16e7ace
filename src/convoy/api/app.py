"""Build the ASGI application: the table of paths and their endpoints."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Scope

from convoy.api.anthropic.answer import MessageAnswer
from convoy.api.anthropic.bodies import decode_messages
from convoy.api.anthropic.models import model_info, model_page
from convoy.api.anthropic.problem import VERSION_HEADER, problem_for
from convoy.api.anthropic.translate import count_tokens, read_messages
from convoy.api.body.intake import Intake
from convoy.api.chat.generate import Generate
from convoy.api.chat.prompt_endpoint import PromptEndpoint
from convoy.api.chat.resume import KeptStreams
from convoy.api.engine_stream import LoopWaker
from convoy.api.guard import Guard
from convoy.api.keys.failed_keys import FailedKeys
from convoy.api.keys.repeats import Repeats
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ServeOptions
from convoy.api.ollama.answer import OllamaAnswer
from convoy.api.ollama.models import Lines, OllamaModels
from convoy.api.ollama.problem import PREFIX, problem_of
from convoy.api.ollama.translate import decode_chat, decode_prompt, read_ollama
from convoy.api.openai.answers import Health, ModelCard, ModelList
from convoy.api.openai.bodies import ChatBody, CompletionBody, decode_body
from convoy.api.openai.chat_answer import ChatAnswer
from convoy.api.openai.completion_answer import CompletionAnswer
from convoy.api.openai.embeddings import EmbeddingAnswer, decode_embeddings, read_embeddings
from convoy.api.openai.parsed_request import read_chat, read_completion
from convoy.api.openai.tokenize import detokenize, tokenize
from convoy.api.page.endpoints import PageEndpoints
from convoy.api.page.rights import PageRights
from convoy.api.page.session_endpoints import SessionEndpoints
from convoy.api.page.status_stream import StatusFeed, StreamedStatus, wants_events
from convoy.api.problem import Problem
from convoy.api.responses.answer import ResponsesAnswer
from convoy.api.responses.bodies import decode_responses
from convoy.api.responses.endpoint import StoredResponses, StreamedRefusals
from convoy.api.responses.store import ResponseStore
from convoy.api.responses.translate import read_response
from convoy.api.service import ServedModel, Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.api.telemetry.http_counts import HttpCounts
from convoy.api.telemetry.metrics import Metrics

# The first arguments of every `Generate`.
_Shared = tuple[Service, ServeOptions, Lifecycle, Intake, Repeats, KeptStreams, LoopWaker]


def make_app(service: Service, options: ServeOptions, lifecycle: Lifecycle | None = None) -> ASGIApp:
    """Return the ASGI application. Call it while its event loop runs, on the loop's thread.

    ``lifecycle`` is that of the running server, so that endpoints see a drain.
    """
    life = lifecycle or Lifecycle()
    # Tokenising competes with the engine for the processor, so one intake bounds all endpoints together.
    intake, dropped = Intake(options), DroppedHistory()
    waker = LoopWaker(asyncio.get_running_loop())
    shared = (service, options, life, intake, Repeats(), KeptStreams(options.resume), waker)
    read_turns = partial(read_chat, dropped=dropped)
    chat = Generate(*shared, "chat", partial(decode_body, kind=ChatBody), read_turns, ChatAnswer)
    decode = partial(decode_body, kind=CompletionBody)
    embeddings = Generate(*shared, "embeddings", decode_embeddings, read_embeddings, EmbeddingAnswer)
    completion = Generate(*shared, "completion", decode, read_completion, CompletionAnswer)
    read = partial(read_messages, dropped=dropped)
    build = partial(MessageAnswer, secret=secrets.token_bytes(32))
    messages = Generate(*shared, "messages", decode_messages, read, build)
    store = ResponseStore() if options.store_responses else None
    answer = partial(read_response, store=store, dropped=dropped)
    generate = Generate(*shared, "responses", decode_responses, answer, partial(ResponsesAnswer, store=store))
    stored = StoredResponses(store)
    read_prompt = partial(PromptEndpoint, service, options, life, intake)
    count = read_prompt(partial(count_tokens, dropped=dropped))
    counts, failed = HttpCounts(), FailedKeys()
    rights = PageRights(options)
    about = _About(service, life, rights)
    if service.switch is not None:
        service.switch.begin()
        life.reach(service.switch)
    sources = (*service.metrics, counts.families, failed.families, dropped.families)
    metrics = Metrics(sources, life, None if options.keys is None else options.keys.families)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
        Route("/v1/responses", StreamedRefusals(generate), methods=["POST"]),
        Route("/v1/responses/{id}", stored.answer, methods=["GET", "DELETE"]),
        *_ollama_routes(shared, dropped),
        *_page_routes(rights, options, service),
        Route("/tokenize", read_prompt(partial(tokenize, dropped=dropped)), methods=["POST"]),
        Route("/detokenize", read_prompt(detokenize), methods=["POST"]),
        Route("/v1/models", about.models),
        Route("/v1/models/{name:path}", about.model),
        Route("/health", about.health),
        Route("/status", about.status),
        Route("/metrics", metrics.answer),
    ]
    guard = Guard(Router(routes, redirect_slashes=False), options, failed, _problem_for, rights)
    return counts.around(guard, routes)


def _page_routes(rights: PageRights, options: ServeOptions, service: Service) -> list[Route]:
    page = PageEndpoints(options, service)
    return [
        *SessionEndpoints(rights, "head", needs_key=options.keys is not None).routes(),
        Route("/page/invitations", page.invitations),
        Route("/page/invitations", page.answer_invitation, methods=["POST"]),
        Route("/page/models", page.change_model, methods=["POST"]),
        Route("/page/pull", page.pull, methods=["POST"]),
        Route("/page/pull", page.stop_pull, methods=["DELETE"]),
    ]


def _ollama_routes(shared: _Shared, dropped: DroppedHistory) -> list[Route]:
    read = partial(read_ollama, dropped=dropped)
    chat, prompt = (
        Lines(Generate(*shared, "chat", decode, read, partial(OllamaAnswer, is_chat=is_chat)))
        for decode, is_chat in ((decode_chat, True), (decode_prompt, False))
    )
    service, options = shared[:2]
    models = OllamaModels(service, options)
    return [
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", prompt, methods=["POST"]),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.running),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/version", models.version),
    ]


def _problem_for(scope: Scope) -> Problem:
    """Return the form of errors for a request, by its path and its headers."""
    return problem_of if scope["path"].startswith(PREFIX) else problem_for(scope)


class _About:
    """Answer questions about the server itself: models, health and status."""

    def __init__(self, service: Service, lifecycle: Lifecycle, rights: PageRights) -> None:
        self._service = service
        self._rights = rights
        self._lifecycle = lifecycle
        self._feed = StatusFeed(service.status, lifecycle, last_status=service.last_status)

    async def models(self, request: Request) -> Response:
        if VERSION_HEADER in request.headers:
            return _json(model_page(self._service.models))
        return _json(ModelList([_card(model) for model in self._service.models]))

    async def model(self, request: Request) -> Response:
        found = self._service.model(request.path_params["name"])
        return _json(model_info(found) if VERSION_HEADER in request.headers else _card(found))

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        if self._lifecycle.draining:
            return _json(Health("draining", "the server is shutting down"), 503)
        ready, reason = await anyio.to_thread.run_sync(self._service.health)
        level = None if self._service.level is None else self._service.level()
        return _json(Health("ready" if ready else "not ready", reason, level), 200 if ready else 503)

    async def status(self, request: Request) -> Response:
        if wants_events(request.headers.get("accept", "")):
            return StreamedStatus(self._feed, partial(self._rights.is_valid, request.scope))
        return _json(await anyio.to_thread.run_sync(self._service.status))


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, max_model_len=model.max_context)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
