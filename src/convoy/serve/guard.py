"""The door: who may speak to this server, and the last stop for every error."""

from __future__ import annotations

import hmac
import logging
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from convoy.errors import ConvoyError
from convoy.serve.exchange import Exchange
from convoy.serve.options import ServeOptions, is_loopback
from convoy.serve.problem import answer_for, body_for, headers_for
from convoy.serve.refusals import ClientGone, Forbidden, Unauthenticated, UnknownPath, WrongMethod

_log = logging.getLogger(__name__)


class Guard:
    """ASGI middleware around everything. Only /health is open to those without the API key."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._options = options
        self._loopback = is_loopback(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(receive, send, self._options.write_timeout_s)
        # With an app in scope the router raises for unknown paths and methods, in place of plain text of its
        # own.
        scope.update({"app": self, "convoy.exchange": exchange})
        began_s = time.monotonic()
        try:
            self._admit(scope)
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            exchange.outcome = "client gone"
        except HTTPException as error:
            await self._refuse(exchange, _routing_error(scope, error))
        except ConvoyError as error:
            await self._refuse(exchange, error)
        except Exception as error:  # noqa: BLE001 - reported by class and place; its text may hold a prompt
            _log.error(
                "internal error request=%s class=%s at=%s", exchange.id, type(error).__name__, _place(error)
            )
            await self._refuse(exchange, error)
        finally:
            if self._options.access_log:
                self._log_access(scope, exchange, time.monotonic() - began_s)

    async def _refuse(self, exchange: Exchange, error: Exception) -> None:
        exchange.outcome = type(error).__name__
        if not exchange.status:
            headers = {**headers_for(error), **exchange.refusal_headers()}
            await exchange.send_json(answer_for(error).status, body_for(error), headers)
        elif not exchange.complete:
            # Headers are out: end the stream with the error, so that it cannot pass for a whole one.
            await exchange.send_events([body_for(error)])
            await exchange.end_events()

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers)
        if scope["path"] == "/health":
            return
        _check_origin(headers)
        self._check_key(headers)

    def _check_host(self, headers: Headers) -> None:
        # A foreign name that resolves to loopback is how a web page reaches a server on its reader's machine.
        host = headers.get("host")
        if not self._loopback or host is None:
            return
        name = (_netloc(host)[0] or "").lower()
        known = {
            self._options.host.lower().strip("[]"),
            *(host.lower() for host in self._options.allowed_hosts),
        }
        if not (is_loopback(name) or name in known):
            raise Forbidden(
                f"this server does not answer to the host {name[:80]!r}",
                hint="call it by localhost or 127.0.0.1, or allow the name when it is started",
            )

    def _check_key(self, headers: Headers) -> None:
        if self._options.api_key is None:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("no api key was sent", hint='send the header "Authorization: Bearer KEY"')
        if not hmac.compare_digest(key.strip().encode(), self._options.api_key.encode()):
            raise Unauthenticated("the api key is not right")

    def _log_access(self, scope: Scope, exchange: Exchange, took_s: float) -> None:
        _log.info(
            "access request=%s method=%s path=%s status=%d outcome=%s took_s=%.3f",
            exchange.id,
            scope["method"],
            ascii(scope["path"][:200])[1:-1],
            exchange.status,
            exchange.outcome or "complete",
            took_s,
        )


def _check_origin(headers: Headers) -> None:
    origin = headers.get("origin")
    if origin is None:
        if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            raise Forbidden("cross-site requests of a browser are refused")
    elif _netloc(headers.get("host", "")) != _netloc(origin.partition("://")[2]) or origin == "null":
        raise Forbidden(f"cross-site requests of a browser are refused, and this one is from {origin[:80]!r}")


def _netloc(host: str) -> tuple[str | None, int | None]:
    """(name, port) of a Host header, without the ports that schemes imply."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return None, None
    return parts.hostname, None if port in {80, 443} else port


def _routing_error(scope: Scope, error: HTTPException) -> ConvoyError:
    path, method = ascii(scope["path"][:200])[1:-1], scope["method"]
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return WrongMethod(f"{path} does not take {method}, expected {allow}", allow=allow)
    return UnknownPath(f"nothing is served at {path}")


def _place(error: BaseException) -> str:
    """file:line of where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"
