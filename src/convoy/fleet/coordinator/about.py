"""Answer the questions about a coordinator itself: its models, health and status, and that it stores nothing.

It is apart from the server because it runs nothing: each answer is read from the coordinator's state.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import anyio.from_thread
import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from convoy.api.anthropic.problem import VERSION_HEADER
from convoy.api.anthropic.shapes import ModelInfo, page_of
from convoy.api.keys.keys import key_of
from convoy.api.lifecycle import Lifecycle
from convoy.api.page.rights import SESSION, PageRights
from convoy.api.page.session_endpoints import page_json
from convoy.api.page.status_stream import StatusFeed, StreamedStatus, wants_events
from convoy.api.refusals import Forbidden, Unauthenticated, UnknownResponse
from convoy.fleet.books.directory import Directory
from convoy.fleet.books.keys import Grant
from convoy.fleet.books.keys import Scope as KeyScope
from convoy.fleet.capacity import ModelState
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.callers import caller_of
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.fleet.coordinator.picture import FleetPicture
from convoy.fleet.coordinator.requests.consume import check_known
from convoy.fleet.coordinator.requests.routed_request import account_of
from convoy.fleet.status import FleetStatus

# No provider tells when its model was made.
_CREATED = "1970-01-01T00:00:00Z"
# Pages that one key may have open.
_MAX_READERS = 8


class CoordinatorAbout:
    """Hold the endpoints. All but `health` need a consumer's key, or for the status a session."""

    def __init__(self, coordinator: Coordinator, lifecycle: Lifecycle, rights: PageRights) -> None:
        self._coordinator = coordinator
        self._lifecycle = lifecycle
        self._rights = rights
        self._picture = FleetPicture(coordinator)
        # A feed asks on a thread, and the coordinator's state is the loop's.
        self._whole = StatusFeed(partial(anyio.from_thread.run_sync, self._picture.whole), lifecycle)
        # The feeds that are read, by the hash of their key.
        self._watches: WeakValueDictionary[bytes, _KeyWatch] = WeakValueDictionary()

    async def check_key(self, request: Request) -> None:
        """Raise `Unauthenticated` or `Forbidden` unless the request has a consumer's key."""
        await account_of(self._coordinator, Headers(scope=request.scope))

    async def status(self, request: Request) -> Response:
        """Answer GET /status: the whole picture to a session, and to a consumer's key its own part of it."""
        streams = wants_events(request.headers.get("accept", ""))
        if request.scope[SESSION] is not None:
            if streams:
                return StreamedStatus(self._whole, partial(self._rights.is_valid, request.scope))
            return page_json(self._picture.whole())
        headers = Headers(scope=request.scope)
        grant = await caller_of(self._coordinator.directory, headers, KeyScope.CONSUMER)
        if not streams:
            return page_json(self._picture.of_key(grant))
        watch = self._watches.get(grant.key_hash)
        if watch is None:
            watch = _KeyWatch(self._picture, self._coordinator.directory, self._lifecycle, key_of(headers))
            self._watches[grant.key_hash] = watch
        return StreamedStatus(watch.feed, watch.is_good)

    async def models(self, request: Request) -> Response:
        """List the models."""
        account = await account_of(self._coordinator, Headers(scope=request.scope))
        models = self._picture.models()
        if VERSION_HEADER in request.headers:
            return _json(page_of([_info(one) for one in models]))
        waiting = self._coordinator.waiting_of(account)
        return _json({"object": "list", "data": [self._card(one, waiting) for one in models]})

    async def model(self, request: Request) -> Response:
        """Describe one model. Raises `UnknownModel`."""
        account = await account_of(self._coordinator, Headers(scope=request.scope))
        name = request.path_params["name"]
        check_known(self._coordinator, name)
        found = self._coordinator.model_state(name)
        if VERSION_HEADER in request.headers:
            return _json(_info(found))
        return _json(self._card(found, self._coordinator.waiting_of(account)))

    async def stored(self, request: Request) -> Response:
        """Refuse to read or delete a response. Raises `UnknownResponse`."""
        await account_of(self._coordinator, Headers(scope=request.scope))
        raise UnknownResponse("a fleet stores no responses")

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        if self._lifecycle.draining:
            return _json(_health("draining", "the coordinator is shutting down"), 503)
        return _json(_health("ready", f"{self._coordinator.num_connected} providers"))

    def _card(self, model: ModelState, waiting: dict[str, int]) -> dict[str, Any]:
        """Return the facts by which a consumer chooses: present providers, their longest context, a price.

        ``waiting`` counts the consumer's own requests by model.
        """
        price = self._coordinator.options.models.get(model.name, ModelOptions()).price
        return {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": "convoy",
            "max_model_len": model.max_context,
            "health": "ready" if model.providers else "no provider",
            "providers": model.providers,
            "levels": model.levels,
            "waiting": waiting.get(model.name, 0),
            "price": {"prompt_micro": price.prompt_micro, "completion_micro": price.completion_micro},
        }


class _KeyWatch:
    """Feed the pages of one key, and notice when the key is revoked or expires."""

    def __init__(self, picture: FleetPicture, directory: Directory, lifecycle: Lifecycle, key: str) -> None:
        self._picture = picture
        self._directory = directory
        self._key = key
        self._is_good = True
        self.feed = StatusFeed(self._status, lifecycle, max_readers=_MAX_READERS)

    def is_good(self) -> bool:
        """Return whether the key was still good when the status was asked for last."""
        return self._is_good

    def _status(self) -> FleetStatus:
        try:
            grant: Grant = self._directory.grant(self._key, KeyScope.CONSUMER)
        except (Unauthenticated, Forbidden):
            self._is_good = False
            raise
        return anyio.from_thread.run_sync(self._picture.of_key, grant)


def _info(model: ModelState) -> ModelInfo:
    return ModelInfo(model.name, model.name, _CREATED, model.max_context, model.max_context)


def _health(status: str, reason: str) -> dict[str, str]:
    """Return the answer of /health. A provider knows a coordinator from a head by ``server``."""
    return {"status": status, "reason": reason, "server": "coordinator"}


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
