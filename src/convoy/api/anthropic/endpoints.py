"""Serve what Anthropic's clients ask beside an answer: the tokens of a prompt, and the models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convoy.api.anthropic.bodies import decode_prompt
from convoy.api.anthropic.shapes import ModelInfo, ModelPage, TokenCount, page_of
from convoy.api.anthropic.translate import count_tokens
from convoy.api.body.intake import Intake, most_body_bytes
from convoy.api.body.read_body import read_body
from convoy.api.exchange import Exchange
from convoy.api.keys.keys import Caller
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ServeOptions
from convoy.api.service import ServedModel, Service
from convoy.api.telemetry.dropped import DroppedHistory


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Count the tokens of a prompt, as an ASGI application. No request reaches the engine."""

    service: Service
    options: ServeOptions
    lifecycle: Lifecycle
    intake: Intake
    dropped: DroppedHistory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the exchange sends
        exchange: Exchange = scope["convoy.exchange"]
        caller: Caller = scope["convoy.caller"]
        with self.lifecycle.answering(), caller.use.begin():
            headers, upload = Headers(scope=scope), self.intake.upload(caller.name)
            max_bytes = most_body_bytes(self.service.models, self.options, chat=True)
            try:
                upload.keep(
                    await read_body(headers, receive, self.options, upload=upload, max_bytes=max_bytes)
                )
                count = await exchange.while_connected(self.intake.read(upload, self._count))
            finally:
                upload.leave()
            await exchange.send_json(200, TokenCount(count))

    def _count(self, data: bytes) -> int:
        return count_tokens(decode_prompt(data), self.service, self.options, dropped=self.dropped)


def model_info(model: ServedModel) -> ModelInfo:
    """Return one model. Prompt and answer share its context, so both have the same limit."""
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(model.name, model.name, created, model.max_context, model.max_context)


def model_page(models: Sequence[ServedModel]) -> ModelPage:
    """Return all models."""
    return page_of([model_info(model) for model in models])
