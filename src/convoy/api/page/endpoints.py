"""Begin and end the sessions of persons, answer invitations, and load models, below ``/page``."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.page.files import SAFE_HEADERS
from convoy.api.page.invitations import InvitationList, InvitationQuestion
from convoy.api.page.rights import SESSION, PageRights, demand_operate
from convoy.api.page.sessions import PageSession
from convoy.api.refusals import BodyTooLong, WrongKey, WrongMediaType
from convoy.api.service import Puller, Service
from convoy.config.type_resolution import resolved
from convoy.errors import RequestError

# A token has 44 characters, and an invitation's id 32.
_MAX_BODY_BYTES = 1024
_Body = TypeVar("_Body")


class _Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str


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


class _About(msgspec.Struct, frozen=True):
    """Tell a page its rights, and whether models ask for an API key."""

    scope: str
    needs_key: bool


class _Ended(msgspec.Struct, frozen=True):
    ended: int


class PageEndpoints:
    """Answer the requests below ``/page``."""

    def __init__(self, rights: PageRights, options: ServeOptions, service: Service) -> None:
        self._rights = rights
        self._service = service
        self._needs_key = options.keys is not None
        page = options.page or PageOptions()
        self._invitations = InvitationList(page.invitations, page.operator_key, page.now)

    async def about(self, request: Request) -> Response:
        """Answer GET /page/session: the scope of the request's session, or of its key."""
        session: PageSession | None = request.scope[SESSION]
        scope = "use" if session is None else session.scope
        return _json(_About(scope, self._needs_key))

    async def begin(self, request: Request) -> Response:
        """Answer POST /page/session: begin a session for a token of ``convoy open``."""
        asked = await _read(request, _Begin, '{"token": TEXT}')
        if self._rights.why_not is not None:
            raise RequestError(self._rights.why_not)
        granted = await anyio.to_thread.run_sync(
            self._rights.use_token, asked.token, request.scope["server"][1]
        )
        if granted is None:
            # A guess counts as a wrong key does, and is answered as slowly.
            raise WrongKey(
                "the token is wrong, was used, or is older than 5 minutes",
                hint="run `convoy open` again, as the head's user on the head's machine",
            )
        secret = self._rights.sessions.begin(granted)
        answer = _json(_About(granted, self._needs_key))
        answer.headers["set-cookie"] = self._rights.cookie(request.scope, secret)
        return answer

    async def end(self, request: Request) -> Response:
        """Answer DELETE /page/session: end the request's own session."""
        self._rights.sessions.end(self._rights.secret_of(request.scope))
        answer = _json(_Ended(1))
        answer.headers["set-cookie"] = self._rights.cookie(request.scope, "")
        return answer

    async def end_all(self, request: Request) -> Response:
        """Answer DELETE /page/sessions: end every session. Needs one that may operate."""
        demand_operate(request.scope[SESSION])
        return _json(_Ended(self._rights.sessions.end_all()))

    async def invitations(self, request: Request) -> Response:
        """Answer GET /page/invitations: the machines that wait to be let in, each with its code."""
        demand_operate(request.scope[SESSION])
        return _json(_Pending(await anyio.to_thread.run_sync(self._invitations.pending)))

    async def answer_invitation(self, request: Request) -> Response:
        """Answer POST /page/invitations: let a machine in, or refuse it."""
        demand_operate(request.scope[SESSION])
        said = await _read(request, _InvitationAnswer, '{"id": TEXT, "code": TEXT, "approves": BOOLEAN}')
        answer = partial(self._invitations.answer, said.id, said.code, approves=said.approves)
        await anyio.to_thread.run_sync(answer)
        return _json(said)

    async def change_model(self, request: Request) -> Response:
        """Answer POST /page/models: load a model or unload it, once the running answers have ended.

        The answer comes when that is done. Raises as `ModelSwitch.hold` does.
        """
        demand_operate(request.scope[SESSION])
        wish = await _read(request, _ModelWish, '{"name": TEXT, "loaded": BOOLEAN}')
        model, switch = self._service.model(wish.name), self._service.switch
        if switch is None:
            raise RequestError("this head keeps its model loaded")
        await (switch.load(model.name) if wish.loaded else switch.unload(model.name))
        return _json(wish)

    async def pull(self, request: Request) -> Response:
        """Answer POST /page/pull: begin to pull a model onto every member. The status says how far it is."""
        demand_operate(request.scope[SESSION])
        wish = await _read(request, _PullWish, '{"name": TEXT}')
        await anyio.to_thread.run_sync(self._puller().start, wish.name)
        return _json(wish)

    async def stop_pull(self, request: Request) -> Response:
        """Answer DELETE /page/pull: stop the pull that runs, soon. A later one goes on from there."""
        demand_operate(request.scope[SESSION])
        await anyio.to_thread.run_sync(self._puller().stop)
        return _json(_PullWish(""))

    def _puller(self) -> Puller:
        if self._service.puller is None:
            raise RequestError("this head pulls no models")
        return self._service.puller


async def _read(request: Request, kind: type[_Body], form: str) -> _Body:
    # Pages of other sites can send text and forms without asking, but not this type.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise WrongMediaType("this body is sent as application/json")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise BodyTooLong(f"the body has more than {_MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(body), type=resolved(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise RequestError(f"the body is not {form}") from None


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), headers=SAFE_HEADERS, media_type="application/json")
