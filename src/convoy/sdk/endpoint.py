"""The HTTP API of a running head, with errors in Convoy's grammar: JSON in, JSON or events out."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from convoy.config.clear_text import check_sealed
from convoy.config.table import SERVE
from convoy.errors import (
    ConfigError,
    ConvoyError,
    Incompatible,
    PeerUnreachable,
    Unavailable,
    UsageError,
)

KEY_VARIABLE = "CONVOY_API_KEY"
DEFAULT_URL = f"http://{SERVE.host}:{SERVE.port}"
_MAX_BODY_BYTES = 16 << 20
_BUSY = frozenset({429, 502, 503, 504})
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
_REMEDY = "ask again: `convoy status` shows whether the cluster is ready"


# Named after the event, as the other errors are: it is no fault of this program.
class HttpRefused(ConvoyError):  # noqa: N818
    """Report an error answer of the server, in the server's words."""


class KeyRefused(HttpRefused, ConfigError):  # noqa: N818
    """Report that the server does not take the API key. Another try does not help."""


class ServerBusy(HttpRefused, Unavailable):
    """Report that the server cannot serve the request now. Another try may succeed."""


@dataclass(frozen=True)
class Endpoint:
    """Call the HTTP API of a server.

    ``get`` and ``post`` raise PeerUnreachable if no server answers, and HttpRefused for an error status.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    server: str = "head"
    start: str = "convoy serve"
    url_option: str = "--url"
    ca: Path | None = None
    ca_option: str = "--ca"
    # Of a person's session, in place of a key.
    cookie: str | None = field(default=None, repr=False)
    key_hint: str = f"give the key's file with --api-key-file, or the key in {KEY_VARIABLE}"

    @classmethod
    def of(
        cls,
        url: str,
        api_key: str | None = None,
        ca: Path | None = None,
        timeout_s: float = 600.0,
        **words: str,
    ) -> Endpoint:
        """Return the endpoint for a caller's values. The address may end in ``/v1``, as clients write it.

        ``words`` are fields that name the caller's options, in place of those of the command line.

        Raises UsageError for a wrong address, and ConfigError for a file without certificates.
        """
        found = cls(url, api_key, timeout_s, ca=ca, **words)
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            usable = False
        if not usable:
            raise UsageError(
                f"{found.url_option} {url} is no HTTP address", hint=f"for example {DEFAULT_URL}"
            )
        address = parts.geturl().rstrip("/").removesuffix("/v1").rstrip("/")
        if ca is not None:
            if parts.scheme != "https":
                raise UsageError(
                    f"{found.ca_option} is for https, and the address is {address}",
                    hint=f"{found.url_option} https://{parts.netloc}",
                )
            found.trusting()
        return replace(found, url=address)

    def get(self, path: str, *, accept: frozenset[int] = frozenset({200})) -> object:
        """Return the JSON at ``path``. The statuses in ``accept`` are no error."""
        with self._open("GET", path, None) as response:
            data = response.read(_MAX_BODY_BYTES)
            if response.status not in accept:
                raise self._refusal(response.status, data)
            return self._json(data)

    def post(self, path: str, body: object) -> object:
        """Send ``body`` and return the JSON of the answer."""
        with self._open("POST", path, json.dumps(body).encode()) as response:
            data = response.read(_MAX_BODY_BYTES)
            if response.status not in {http.client.OK, http.client.CREATED}:
                raise self._refusal(response.status, data)
            return self._json(data)

    def delete(self, path: str) -> object:
        """Send DELETE and return the JSON of the answer."""
        with self._open("DELETE", path, None) as response:
            data = response.read(_MAX_BODY_BYTES)
            if response.status != http.client.OK:
                raise self._refusal(response.status, data)
            return self._json(data)

    @contextmanager
    def session(self, token: str) -> Iterator[Endpoint]:
        """Yield this endpoint in a session that a token of `OpenTokens` begins. It ends with the block."""
        with self._open("POST", "/page/session", json.dumps({"token": token}).encode()) as response:
            data, cookie = response.read(_MAX_BODY_BYTES), response.getheader("set-cookie", "")
            if response.status != http.client.OK:
                raise self._refusal(response.status, data)
        signed_in = replace(self, cookie=cookie.partition(";")[0])
        try:
            yield signed_in
        finally:
            # A head that is gone has no sessions.
            with suppress(ConvoyError):
                signed_in.delete("/page/session")

    def stream(self, path: str, body: object) -> Iterator[dict[str, object]]:
        """POST and yield the JSON of each event until ``[DONE]``. Raises HttpRefused for an error event."""
        with self._open("POST", path, json.dumps(body).encode()) as response:
            if response.status != http.client.OK:
                raise self._refusal(response.status, response.read(_MAX_BODY_BYTES))
            for line in self._lines(response):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    event = self._json(line.removeprefix(b"data: "))
                    if not isinstance(event, dict):
                        raise self.not_ours("no JSON object")
                    # Once the status line is sent, the server can only report an error as an event.
                    if "error" in event:
                        raise self._refusal(response.status, line.removeprefix(b"data: "))
                    yield event
            # Without [DONE] the answer is incomplete, even if the connection closed in order.
            raise PeerUnreachable(
                f"the stream from {self.url} ended before the answer was complete", hint=_REMEDY
            )

    def watch(self, path: str) -> Iterator[dict[str, object]]:
        """Yield the JSON of each event of GET ``path``, until the server ends them or is gone.

        Raises PeerUnreachable if it is gone, and HttpRefused for an error status.
        """
        with self._open("GET", path, None, accept="text/event-stream") as response:
            if response.status != http.client.OK:
                raise self._refusal(response.status, response.read(_MAX_BODY_BYTES))
            for line in self._lines(response):
                if line.startswith(b"data: "):
                    event = self._json(line.removeprefix(b"data: "))
                    if not isinstance(event, dict):
                        raise self.not_ours("no JSON object")
                    yield event

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            while line := response.readline(_MAX_BODY_BYTES):
                yield line.strip()
        except (OSError, http.client.HTTPException) as error:
            raise PeerUnreachable(
                f"the stream from {self.url} broke: {_reason(error)}", hint=_REMEDY
            ) from None

    @contextmanager
    def _open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        accept: str = "application/json, text/event-stream",
    ) -> Iterator[http.client.HTTPResponse]:
        if self.api_key is not None or self.cookie is not None:
            check_sealed(self.url, "send a key to")
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        connection = http.client.HTTPConnection(host, port, timeout=self.timeout_s)
        if parts.scheme == "https":
            context = self.trusting()
            connection = http.client.HTTPSConnection(host, port, timeout=self.timeout_s, context=context)
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if self.cookie is not None:
            headers["Cookie"] = self.cookie
        try:
            try:
                connection.request(method, parts.path + path, body, headers)
                response = connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                raise ConfigError(
                    f"the certificate that {self.url} shows is not trusted: {error.verify_message}",
                    hint=f"{self.ca_option} FILE trusts the certificates in FILE",
                ) from None
            except ssl.SSLError:
                raise ConfigError(
                    f"the server at {self.url} does not speak TLS",
                    hint=f"{self.url_option} http://... for a server without a certificate",
                ) from None
            except (OSError, http.client.HTTPException) as error:
                raise PeerUnreachable(
                    f"no {self.server} answers at {self.url}: {_reason(error)}",
                    hint=f"start one with `{self.start}`, wait until it prints that it serves, or name its "
                    f"address with {self.url_option}",
                ) from None
            yield response
        finally:
            connection.close()

    def _json(self, data: bytes) -> object:
        try:
            return json.loads(data)
        except ValueError:
            raise self.not_ours("no JSON") from None

    def not_ours(self, why: str) -> ConvoyError:
        """Return the error for an answer that no head of this version gives."""
        return Incompatible(
            f"the server at {self.url} is not this version of Convoy: {why}", hint=f"check {self.url_option}"
        )

    def trusting(self) -> ssl.SSLContext:
        """Return a TLS context that checks a server's certificate by its own ``ca`` alone, or by the system's
        authorities.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is None:
            context.load_default_certs()
            return context
        # This flag lets a server's own certificate be the trust anchor, without its issuer.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:
            reason = "it has no certificate in PEM" if isinstance(error, ssl.SSLError) else _reason(error)
            raise ConfigError(
                f"cannot use {self.ca} for {self.ca_option}: {reason}",
                hint="FILE is in PEM: the server's own certificate, or that of its issuer",
            ) from None
        return context

    def _refusal(self, status: int, data: bytes) -> HttpRefused:
        """Return the error for a status, with the server's own message if it sent one."""
        message, hint = f"the server answered {status}", None
        try:
            error = json.loads(data)["error"]
            message = str(error["message"])
            hint = None if error.get("hint") is None else str(error["hint"])
            # The server's advice is for programs that have other servers to ask.
            if error.get("code") == "draining":
                message = message.removesuffix(" (send the request to another server)")
                hint = "ask again once `convoy serve` is started again"
            elif error.get("code") == "model_not_found":
                hint = "name a model that is served, or none if one is; `convoy serve MODEL` serves another"
            elif error.get("code") == "pull_running":
                hint = "wait until it is here, or stop it on the page: `convoy open`"
            elif error.get("code") == "not_found" and hint is None:
                hint = f"does another part of Convoy listen there? check {self.url_option}"
        except (ValueError, TypeError, KeyError, AttributeError):
            # The body explains nothing, so the status is all there is to report.
            hint = "does another program listen there? --url names a head of Convoy"
        if status == http.client.UNAUTHORIZED:
            return KeyRefused(message, hint=hint or self.key_hint)
        return (ServerBusy if status in _BUSY else HttpRefused)(message, hint=hint)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).lower()


def dialled_url(host: str, port: int) -> str:
    """Return the URL of a server that listens on ``host``; of a wildcard address, on loopback."""
    bare = host.strip("[]")
    bare = _ANYWHERE.get(bare, bare)
    return f"http://[{bare}]:{port}" if ":" in bare else f"http://{bare}:{port}"


def head_answers(host: str, port: int, timeout_s: float = 4.0) -> bool:
    """Return whether a head of Convoy answers HTTP there."""
    try:
        health = Endpoint(dialled_url(host, port), timeout_s=timeout_s).get(
            "/health", accept=frozenset({200, 503})
        )
    except ConvoyError:
        return False
    return isinstance(health, dict) and "status" in health
