"""Connect a proxy to its coordinator. Every byte of the coordinator's answers is suspect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from convoy.api.anthropic.problem import VERSION_HEADER
from convoy.api.problem import ErrorBody, ErrorDetail
from convoy.config.clear_text import check_sealed, without_userinfo
from convoy.config.type_resolution import resolved
from convoy.errors import ConfigError, FrameError, ProviderError
from convoy.fleet.apis.table import APIS
from convoy.fleet.lease import (
    ANSWER_TYPE,
    MAX_LEASED_BYTES,
    SEALED_TYPE,
    Lease,
    LeaseAsked,
    Reseal,
    read_lease,
)
from convoy.fleet.outgoing_tls import verified_tls, why_unreachable
from convoy.wire.fleet.messages import Kind
from convoy.wire.text import plain_text

_CONNECT_S, _READ_S = 10.0, 600.0
_MAX_MODELS_BYTES = 16 * 1024 * 1024


class ProxyRefusal(Exception):  # noqa: N818 - an answer, not a fault
    """Signal that the coordinator refuses. Its words were made harmless.

    ``retry_after`` are its seconds, or empty.
    """

    def __init__(self, status: int, body: ErrorBody, retry_after: str) -> None:
        super().__init__(f"the coordinator answers {status}")
        self.status = status
        self.body = body
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class SealedAnswer:
    """Hold an answer that has begun; ``body`` is read as it comes."""

    body: AsyncIterator[bytes]
    # Microseconds, as far as they are known.
    timing: dict[str, int]


def check_url(url: str) -> None:
    """Check that only this machine itself is dialled in clear text. Raises `ConfigError`."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"the coordinator {without_userinfo(url)!r} is no URL of HTTP", hint="https://HOST")
    check_sealed(url, "speak to")


class CoordinatorClient:
    """Ask a coordinator. ``api_key`` is the key of an account there."""

    def __init__(self, url: str, api_key: str) -> None:
        check_url(url)
        base = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(
            base_url=base,
            headers={"authorization": f"Bearer {api_key}", "accept-encoding": "identity"},
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            # `check_url` allows http only for loopback.
            verify=verified_tls() if base.startswith("https") else False,
            # Proxies and keys of the environment are not meant for the coordinator.
            trust_env=False,
            follow_redirects=False,
        )

    async def lease(self, asked: LeaseAsked, idempotency_key: str | None, trace: str = "") -> Lease:
        """Return a lease. ``trace`` is a traceparent.

        Raises `ProxyRefusal`, and `ProviderError` for an invalid answer.
        """
        headers = {"content-type": "application/json"} | ({"traceparent": trace} if trace else {})
        if idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key
        async with self._ask("POST", "/v1/leases", msgspec.json.encode(asked), headers) as response:
            data = await bounded(response, MAX_LEASED_BYTES)
            if response.status_code != 200:
                raise _refusal(response, data)
            return _lease(data, Lease)

    @asynccontextmanager
    async def use(self, lease: Lease, sealed: bytes) -> AsyncIterator[SealedAnswer | Lease]:
        """Yield the answer to a sealed body, or another lease to seal for. Raises as `lease`."""
        path, headers = f"/v1/leases/{lease.lease}", {"content-type": SEALED_TYPE}
        async with self._ask("POST", path, sealed, headers) as response:
            kind = response.headers.get("content-type", "")
            if response.status_code == 200 and kind == ANSWER_TYPE:
                yield SealedAnswer(pieces(response), _timing(response))
                return
            data = await bounded(response, MAX_LEASED_BYTES)
            if response.status_code == 409:
                yield _lease(data, Reseal).reseal
                return
            if response.status_code == 200:
                raise suspect("the coordinator answers a sealed request in clear text")
            raise _refusal(response, data)

    async def release(self, lease: Lease) -> None:
        """Give a lease back early; it would run out soon anyway."""
        try:
            request = self._client.build_request("DELETE", f"/v1/leases/{lease.lease}", timeout=_CONNECT_S)
            response = await self._client.send(request, stream=True)
            # Left unread: the answer may be of any length, and does not matter.
            await response.aclose()
        except httpx.HTTPError:
            return

    @asynccontextmanager
    async def plain(
        self, kind: Kind, body: bytes, idempotency_key: str | None
    ) -> AsyncIterator[httpx.Response]:
        """Send the text itself, for users that allow that, and yield the response."""
        headers = {"content-type": "application/json"}
        if idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key
        async with self._ask("POST", APIS[kind].path, body, headers) as response:
            yield response

    async def models(self, name: str = "", *, version: str = "") -> tuple[int, bytes]:
        """Return the status and the JSON of the coordinator's models or of one of them, as they come.

        ``version`` is the tool's anthropic-version, which asks for another form.
        """
        path = f"/v1/models/{quote(name, safe='')}" if name else "/v1/models"
        headers = {VERSION_HEADER: version} if version.isascii() and version.isprintable() and version else {}
        async with self._ask("GET", path, b"", headers) as response:
            return response.status_code, await bounded(response, _MAX_MODELS_BYTES)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    @asynccontextmanager
    async def _ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> AsyncIterator[httpx.Response]:
        request = self._client.build_request(method, path, content=body, headers=headers)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise suspect(f"the coordinator cannot be reached: {why_unreachable(error)}") from None
        try:
            yield response
        finally:
            await response.aclose()


def suspect(text: str) -> ProviderError:
    """Return the error for a coordinator's misbehaviour. The user's tool may read its text."""
    return ProviderError(text, public=text)


async def pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the pieces of a response. Raises `ProviderError` if it breaks off."""
    try:
        async for piece in response.aiter_raw():
            yield piece
    except httpx.HTTPError as error:
        raise suspect(f"the coordinator broke off: {why_unreachable(error)}") from None


async def bounded(response: httpx.Response, most: int) -> bytes:
    """Return a whole body. Raises `ProviderError` as `pieces` does, and for a longer one."""
    data = bytearray()
    async for piece in pieces(response):
        data += piece
        if len(data) > most:
            raise suspect(f"the coordinator answers with more than {most} bytes")
    return bytes(data)


L = TypeVar("L", Lease, Reseal)


def _lease(data: bytes, kind: type[L]) -> L:
    try:
        return read_lease(data, kind)
    except FrameError:
        raise suspect("the coordinator answers something that is no lease") from None


def _timing(response: httpx.Response) -> dict[str, int]:
    try:
        found = msgspec.json.decode(response.headers.get("x-timing", "{}")[:4096], type=dict[str, int])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {name: us for name, us in found.items() if name.isascii() and name.isidentifier()}


def _refusal(response: httpx.Response, data: bytes) -> ProxyRefusal:
    status = response.status_code if 400 <= response.status_code <= 599 else 502
    try:
        said = msgspec.json.decode(data, type=resolved(ErrorBody)).error
        # The proxy never looks at the tool's own key, so a refused key is always the proxy's.
        whose = " (the key of this proxy's --api-key-file)" if status in {401, 403} else ""
        detail = ErrorDetail(
            plain_text(said.message, 500) + whose,
            plain_text(said.type, 60),
            None if said.param is None else plain_text(said.param, 60),
            None if said.code is None else plain_text(said.code, 60),
        )
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = f"the coordinator answers {response.status_code}"
        detail = ErrorDetail(text, "server_error", None, "coordinator")
    retry_after = response.headers.get("retry-after", "")
    wait = retry_after if retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 6 else ""
    return ProxyRefusal(status, ErrorBody(detail), wait)
