"""Admit or refuse each request by its host, origin and key, and turn every error into an answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from convoy.api.exchange import Exchange
from convoy.api.keys.failed_keys import FailedKeys
from convoy.api.keys.keys import Caller, anyone, key_of
from convoy.api.listen.options import ServeOptions
from convoy.api.listen.origins import Origins, preflight
from convoy.api.page.rights import SESSION, PageRights
from convoy.api.problem import Problem, answer_for, body_for, headers_for, log_internal_error
from convoy.api.refusals import ClientGone, Unauthenticated, UnknownPath, WrongMethod
from convoy.errors import ConvoyError

_log = logging.getLogger(__name__)


class Guard:
    """Wrap the application in host, origin and key checks.

    Open to callers without a key are /health, HEAD /, and the paths that `PageRights` names.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        failed: FailedKeys | None = None,
        problem_of: Callable[[Scope], Problem] = lambda _: body_for,
        rights: PageRights | None = None,
    ) -> None:
        """Set up the checks of ``options``. ``failed`` counts wrong keys; by default it is a new counter.

        ``problem_of`` returns the form of errors for a request, as its API has it.
        """
        self._app = app
        self._problem_of = problem_of
        self._options = options
        self._origins = Origins(options)
        self._failed = failed or FailedKeys()
        self._anyone = anyone()
        self._rights = rights or PageRights(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(receive, send, self._options.write_timeout_s, self._problem_of(scope))
        # With an app in scope the router raises for unknown paths and methods, in place of plain text of its
        # own.
        scope.update({"app": self, "convoy.exchange": exchange})
        began_s = time.monotonic()
        try:
            if not await self._admit(scope, exchange):
                await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            exchange.outcome = "client gone"
        except HTTPException as error:
            await self._refuse(exchange, _routing_error(scope, error))
        except Unauthenticated as error:
            client = scope.get("client") or ("?", 0)
            await self._refuse(exchange, await self._failed.refuse(error, client[0]))
        except ConvoyError as error:
            await self._refuse(exchange, error)
        except Exception as error:  # noqa: BLE001 - reported by class and place; its text may hold a prompt
            log_internal_error(_log, exchange.id, error)
            await self._refuse(exchange, error)
        finally:
            if self._options.access_log:
                self._log_access(scope, exchange, time.monotonic() - began_s)

    async def _refuse(self, exchange: Exchange, error: Exception) -> None:
        """Answer with ``error``, or end a stream that has begun with it."""
        exchange.outcome = type(error).__name__
        if not exchange.status:
            headers = {**headers_for(error), **exchange.refusal_headers()}
            await exchange.send_json(answer_for(error).status, exchange.problem(error), headers)
        elif not exchange.complete:
            # The headers are sent. End the stream with the error, so that it does not look complete.
            await exchange.send_events(exchange.failure(error))
            await exchange.end_events()

    async def _admit(self, scope: Scope, exchange: Exchange) -> bool:
        """Check and record the caller. Return whether the request is answered already, as a preflight is."""
        headers = Headers(scope=scope)
        self._origins.check_host(headers)
        scope["convoy.caller"] = self._anyone
        self._rights.note_session(scope)
        if scope["path"] == "/health" or (scope["path"], scope["method"]) == ("/", "HEAD"):
            return False
        exchange.headers = self._origins.check_origin(headers)
        if exchange.headers:
            # Another site's page may call the API with a key, and never act with its reader's session.
            scope[SESSION] = None
        permitted = preflight(headers, exchange.headers) if scope["method"] == "OPTIONS" else None
        if permitted is not None:
            exchange.headers = permitted
            await exchange.send_empty(204)
            return True
        if self._options.keys is not None and not self._rights.needs_no_key(scope):
            caller: Caller = self._options.keys.find(key_of(headers))
            scope["convoy.caller"] = caller
            exchange.caller = caller.name
        return False

    def _log_access(self, scope: Scope, exchange: Exchange, took_s: float) -> None:
        _log.info(
            "access request=%s key=%s method=%s path=%s status=%d outcome=%s took_s=%.3f",
            exchange.id,
            exchange.caller or "-",
            scope["method"],
            ascii(scope["path"][:200])[1:-1],
            exchange.status,
            exchange.outcome or "complete",
            took_s,
        )


def _routing_error(scope: Scope, error: HTTPException) -> ConvoyError:
    path, method = ascii(scope["path"][:200])[1:-1], scope["method"]
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return WrongMethod(f"{path} does not take {method}, expected {allow}", allow=allow)
    return UnknownPath(f"nothing is served at {path}")
