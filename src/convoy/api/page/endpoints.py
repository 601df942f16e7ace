"""Begin and end the sessions of persons, below ``/page``."""

from __future__ import annotations

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from convoy.api.page.files import SAFE_HEADERS
from convoy.api.page.rights import SESSION, PageRights, demand_operate
from convoy.api.page.sessions import PageSession
from convoy.api.refusals import BodyTooLong, WrongKey, WrongMediaType
from convoy.config.type_resolution import resolved
from convoy.errors import RequestError

# A token has 44 characters.
_MAX_BODY_BYTES = 1024


class _Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str


class _About(msgspec.Struct, frozen=True):
    """Tell a page its rights, and whether models ask for an API key."""

    scope: str
    needs_key: bool


class _Ended(msgspec.Struct, frozen=True):
    ended: int


class PageEndpoints:
    """Answer the requests below ``/page``. ``needs_key`` tells whether requests to models need a key."""

    def __init__(self, rights: PageRights, *, needs_key: bool) -> None:
        self._rights = rights
        self._needs_key = needs_key

    async def about(self, request: Request) -> Response:
        """Answer GET /page/session: the scope of the request's session, or of its key."""
        session: PageSession | None = request.scope[SESSION]
        scope = "use" if session is None else session.scope
        return _json(_About(scope, self._needs_key))

    async def begin(self, request: Request) -> Response:
        """Answer POST /page/session: begin a session for a token of ``convoy open``."""
        asked = await _read_begin(request)
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


async def _read_begin(request: Request) -> _Begin:
    # Pages of other sites can send text and forms without asking, but not this type.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise WrongMediaType("a token is sent as application/json")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise BodyTooLong(f"the body has more than {_MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(body), type=resolved(_Begin))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise RequestError('the body is not {"token": TEXT}') from None


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), headers=SAFE_HEADERS, media_type="application/json")
