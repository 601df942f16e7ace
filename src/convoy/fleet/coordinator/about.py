"""Answer the questions about a coordinator itself: its models, its health, and that it stores nothing.

It is apart from the server because it runs nothing: each answer is read from the coordinator's state.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from convoy.api.anthropic.problem import VERSION_HEADER
from convoy.api.anthropic.shapes import ModelInfo, page_of
from convoy.api.lifecycle import Lifecycle
from convoy.api.refusals import UnknownResponse
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.fleet.coordinator.requests.consume import check_known
from convoy.fleet.coordinator.requests.routed_request import account_of

# No provider tells when its model was made.
_CREATED = "1970-01-01T00:00:00Z"


class CoordinatorAbout:
    """Hold the endpoints. All but `root` and `health` need a consumer's key."""

    def __init__(self, coordinator: Coordinator, lifecycle: Lifecycle) -> None:
        self._coordinator = coordinator
        self._lifecycle = lifecycle

    async def root(self, request: Request) -> Response:  # noqa: ARG002
        """Answer HEAD /, by which Anthropic's clients see whether a server is there."""
        return Response()

    async def models(self, request: Request) -> Response:
        """List the models."""
        await account_of(self._coordinator, Headers(scope=request.scope))
        names = self._coordinator.models()
        if VERSION_HEADER in request.headers:
            return _json(page_of([self._info(name) for name in names]))
        return _json({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """Describe one model. Raises `UnknownModel`."""
        await account_of(self._coordinator, Headers(scope=request.scope))
        name = request.path_params["name"]
        check_known(self._coordinator, name)
        return _json(self._info(name) if VERSION_HEADER in request.headers else self._card(name))

    async def stored(self, request: Request) -> Response:
        """Refuse to read or delete a response. Raises `UnknownResponse`."""
        await account_of(self._coordinator, Headers(scope=request.scope))
        raise UnknownResponse("a fleet stores no responses")

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        if self._lifecycle.draining:
            return _json({"status": "draining", "reason": "the coordinator is shutting down"}, 503)
        return _json({"status": "ready", "reason": f"{len(self._coordinator.providers())} providers"})

    def _card(self, name: str) -> dict[str, Any]:
        """Return the facts by which a consumer chooses: present providers, their longest context, a price."""
        coordinator = self._coordinator
        price = coordinator.options.models.get(name, ModelOptions()).price
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "convoy",
            "max_model_len": coordinator.max_context(name),
            "health": "ready" if coordinator.num_providers(name) else "no provider",
            "providers": coordinator.num_providers(name),
            "levels": coordinator.levels(name),
            "waiting": coordinator.waiting(name),
            "price": {"prompt_micro": price.prompt_micro, "completion_micro": price.completion_micro},
        }

    def _info(self, name: str) -> ModelInfo:
        room = self._coordinator.max_context(name)
        return ModelInfo(name, name, _CREATED, room, room)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
