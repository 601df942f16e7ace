"""Answer invitations, and load models, below ``/page`` of a head."""

from __future__ import annotations

from functools import partial

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.page.invitations import InvitationList, InvitationQuestion
from convoy.api.page.rights import SESSION, demand_operate
from convoy.api.page.session_endpoints import page_json, read_page_body
from convoy.api.service import Puller, Service
from convoy.errors import RequestError


class _InvitationAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Carry a person's answer, with the code that this person compared."""

    id: str
    code: str
    approves: bool


class _ModelWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Carry a person's wish: this model is to be loaded, or to be unloaded."""

    name: str
    loaded: bool


class _PullWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Carry the name of a model to pull; empty in the answer to a wish to stop."""

    name: str


class _Pending(msgspec.Struct, frozen=True):
    invitations: list[InvitationQuestion]


class PageEndpoints:
    """Answer the requests below ``/page`` that only a head has. Each needs a session that may operate."""

    def __init__(self, options: ServeOptions, service: Service) -> None:
        self._service = service
        page = options.page or PageOptions()
        self._invitations = InvitationList(page.invitations, page.operator_key, page.now)

    async def invitations(self, request: Request) -> Response:
        """Answer GET /page/invitations: the machines that wait to be let in, each with its code."""
        demand_operate(request.scope[SESSION])
        return page_json(_Pending(await anyio.to_thread.run_sync(self._invitations.pending)))

    async def answer_invitation(self, request: Request) -> Response:
        """Answer POST /page/invitations: let a machine in, or refuse it."""
        demand_operate(request.scope[SESSION])
        form = '{"id": TEXT, "code": TEXT, "approves": BOOLEAN}'
        said = await read_page_body(request, _InvitationAnswer, form)
        answer = partial(self._invitations.answer, said.id, said.code, approves=said.approves)
        await anyio.to_thread.run_sync(answer)
        return page_json(said)

    async def change_model(self, request: Request) -> Response:
        """Answer POST /page/models: load a model or unload it, once the running answers have ended.

        The answer comes when that is done. Raises as `ModelSwitch.hold` does.
        """
        demand_operate(request.scope[SESSION])
        wish = await read_page_body(request, _ModelWish, '{"name": TEXT, "loaded": BOOLEAN}')
        model, switch = self._service.model(wish.name), self._service.switch
        if switch is None:
            raise RequestError("this head keeps its model loaded")
        await (switch.load(model.name) if wish.loaded else switch.unload(model.name))
        return page_json(wish)

    async def pull(self, request: Request) -> Response:
        """Answer POST /page/pull: begin to pull a model onto every member. The status says how far it is."""
        demand_operate(request.scope[SESSION])
        wish = await read_page_body(request, _PullWish, '{"name": TEXT}')
        await anyio.to_thread.run_sync(self._puller().start, wish.name)
        return page_json(wish)

    async def stop_pull(self, request: Request) -> Response:
        """Answer DELETE /page/pull: stop the pull that runs, soon. A later one goes on from there."""
        demand_operate(request.scope[SESSION])
        await anyio.to_thread.run_sync(self._puller().stop)
        return page_json(_PullWish(""))

    def _puller(self) -> Puller:
        if self._service.puller is None:
            raise RequestError("this head pulls no models")
        return self._service.puller
