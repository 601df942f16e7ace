"""Describe the served models, and mark the requests that get lines of JSON."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from convoy import __version__
from convoy.api.body.read_body import read_body
from convoy.api.exchange import Exchange
from convoy.api.listen.options import ServeOptions
from convoy.api.ollama.translate import served_name
from convoy.api.openai.bodies import convert_object, decode_object
from convoy.api.service import ServedModel, Service
from convoy.config.type_resolution import resolved

# What this server does not know of a model.
_DETAILS: dict[str, Any] = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": None,
    "parameter_size": "",
    "quantization_level": "",
}
_MAX_SHOW_BYTES = 64 * 1024
_TIME = "%Y-%m-%dT%H:%M:%SZ"
# Ollama, too, names a year that no reader sees.
_NEVER = datetime(2318, 1, 1, tzinfo=UTC)


class Lines:
    """Wrap an endpoint that generates: its streams are lines of JSON, and not server-sent events."""

    def __init__(self, generate: ASGIApp) -> None:
        self._generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["convoy.exchange"]
        exchange.sends_lines = True
        await self._generate(scope, receive, send)


class ShowBody(msgspec.Struct, frozen=True):
    """Hold the body of POST /api/show. ``name`` is the older name of ``model``."""

    model: str | None = None
    name: str | None = None


class _LoadedStage(msgspec.Struct, frozen=True):
    """Hold the part of a stage's status that `/api/ps` shows."""

    weight_bytes: int
    device: str


class _Loaded(msgspec.Struct, frozen=True):
    """Hold the part of the status that `/api/ps` shows."""

    stages: list[_LoadedStage] = []


class OllamaModels:
    """Answer GET /api/tags, GET /api/ps, POST /api/show and GET /api/version."""

    def __init__(self, service: Service, options: ServeOptions) -> None:
        self._service = service
        self._options = replace(options, max_body_bytes=_MAX_SHOW_BYTES)

    async def tags(self, request: Request) -> Response:  # noqa: ARG002
        return _json({"models": [_tag(model) for model in self._service.models]})

    async def show(self, request: Request) -> Response:
        """Return the description of one model. Raises `RequestError` or `UnknownModel`."""
        data = await read_body(request.headers, request.receive, self._options)
        body = convert_object(decode_object(data), ShowBody)
        given = body.model or body.name
        model = self._service.model(None if given is None else served_name(given, self._service))
        tools = ["tools"] if model.tokenizer.reply_format.has_calls else []
        return _json(
            {
                "modified_at": _time(model),
                "details": _DETAILS,
                "model_info": {"general.architecture": "convoy", "convoy.context_length": model.max_context},
                "capabilities": ["completion", *tools],
            }
        )

    async def running(self, request: Request) -> Response:  # noqa: ARG002
        """Answer GET /api/ps: the loaded model, and when it is unloaded if no request comes."""
        switch = self._service.switch
        models = [model for model in self._service.models if switch is None or switch.loaded == model.name]
        left_s = None if switch is None else switch.expires_in_s
        expires = _NEVER if left_s is None else datetime.now(UTC) + timedelta(seconds=left_s)
        shown: dict[str, Any] = {"expires_at": f"{expires:{_TIME}}"}
        if models:
            shown |= _sizes(await anyio.to_thread.run_sync(self._service.last_status or self._service.status))
        contexts = [{"context_length": model.max_context} for model in models]
        return _json({"models": [_tag(m) | shown | c for m, c in zip(models, contexts, strict=True)]})

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        return _json({"version": __version__})


def _tag(model: ServedModel) -> dict[str, Any]:
    shown = {"name": model.name, "model": model.name, "modified_at": _time(model)}
    return {**shown, "size": 0, "digest": "", "details": _DETAILS}


def _sizes(status: object) -> dict[str, int]:
    """Return the bytes of the weights that are loaded, on all members and on devices other than a CPU."""
    stages = msgspec.json.decode(msgspec.json.encode(status), type=resolved(_Loaded)).stages
    on_devices = [stage.weight_bytes for stage in stages if not set(stage.device.split("+")) <= {"", "cpu"}]
    return {"size": sum(stage.weight_bytes for stage in stages), "size_vram": sum(on_devices)}


def _time(model: ServedModel) -> str:
    return f"{datetime.fromtimestamp(model.created, UTC):{_TIME}}"


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
