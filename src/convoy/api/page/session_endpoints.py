"""Begin and end the sessions of persons, below ``/page/session``, at a head and at a coordinator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from convoy.api.page.files import SAFE_HEADERS, PageFiles
from convoy.api.page.rights import SESSION, PageRights, demand_operate
from convoy.api.page.sessions import PageSession
from convoy.api.refusals import BodyTooLong, WrongKey, WrongMediaType
from convoy.config.type_resolution import resolved
from convoy.errors import RequestError

# A token has 44 characters, and an invitation's id 32.
_MAX_BODY_BYTES = 1024
_Body = TypeVar("_Body")


class _Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str


class _About(msgspec.Struct, frozen=True):
    """Tell a page its rights, whether models ask for an API key, and which program serves it."""

    scope: str
    needs_key: bool
    server: str


class _Ended(msgspec.Struct, frozen=True):
    ended: int


async def _admitted(request: Request) -> None:
    """Admit a request without a session, because the `Guard` has checked its key."""


class SessionEndpoints:
    """Answer the requests below ``/page`` that a head and a coordinator share."""

    def __init__(
        self,
        rights: PageRights,
        server: Literal["head", "coordinator"],
        *,
        needs_key: bool,
        check_key: Callable[[Request], Awaitable[object]] = _admitted,
    ) -> None:
        """Prepare to answer. ``check_key`` raises if a request without a session has no right key."""
        self._rights = rights
        self._server = server
        self._needs_key = needs_key
        self._check_key = check_key

    def routes(self) -> list[Route]:
        """Return the page, its files, and the paths of sessions."""
        files = PageFiles(self._rights)
        return [
            Route("/", files.root),
            Route("/page/static/{name:path}", files.static),
            Route("/page/session", self.about),
            Route("/page/session", self.begin, methods=["POST"]),
            Route("/page/session", self.end, methods=["DELETE"]),
            Route("/page/sessions", self.end_all, methods=["DELETE"]),
        ]

    async def about(self, request: Request) -> Response:
        """Answer GET /page/session: the scope of the request's session, or of its key."""
        session: PageSession | None = request.scope[SESSION]
        if session is None:
            await self._check_key(request)
        return page_json(self._about("use" if session is None else session.scope))

    async def begin(self, request: Request) -> Response:
        """Answer POST /page/session: begin a session for a token of ``convoy open``."""
        asked = await read_page_body(request, _Begin, '{"token": TEXT}')
        if self._rights.why_not is not None:
            raise RequestError(self._rights.why_not)
        granted = await anyio.to_thread.run_sync(
            self._rights.use_token, asked.token, request.scope["server"][1]
        )
        if granted is None:
            # A guess counts as a wrong key does, and is answered as slowly.
            raise WrongKey(
                "the token is wrong, was used, or is older than 5 minutes",
                hint=f"run `convoy open` again, as the {self._server}'s user on the {self._server}'s machine",
            )
        secret = self._rights.sessions.begin(granted)
        answer = page_json(self._about(granted))
        answer.headers["set-cookie"] = self._rights.cookie(request.scope, secret)
        return answer

    async def end(self, request: Request) -> Response:
        """Answer DELETE /page/session: end the request's own session."""
        self._rights.sessions.end(self._rights.secret_of(request.scope))
        answer = page_json(_Ended(1))
        answer.headers["set-cookie"] = self._rights.cookie(request.scope, "")
        return answer

    async def end_all(self, request: Request) -> Response:
        """Answer DELETE /page/sessions: end every session. Needs one that may operate."""
        demand_operate(request.scope[SESSION])
        return page_json(_Ended(self._rights.sessions.end_all()))

    def _about(self, scope: str) -> _About:
        return _About(scope, self._needs_key, self._server)


async def read_page_body(request: Request, kind: type[_Body], form: str) -> _Body:
    """Return a short body in JSON. Raises `WrongMediaType`, `BodyTooLong` or `RequestError`."""
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


def page_json(body: object) -> Response:
    """Return an answer in JSON with the headers of every answer to the page."""
    return Response(msgspec.json.encode(body), headers=SAFE_HEADERS, media_type="application/json")
