"""Ask the engine behind a provider: any server that speaks OpenAI's HTTP, also the head of a cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from convoy.config.clear_text import without_userinfo
from convoy.crypto.certificate import from_pem
from convoy.errors import ConfigError, ConvoyError, ProviderError
from convoy.fleet.answer import AnswerHead
from convoy.fleet.apis.table import APIS
from convoy.fleet.capacity import MAX_TEMPLATE_TOKENS, Capacity
from convoy.fleet.events import EventReader
from convoy.fleet.outgoing_tls import why_unreachable
from convoy.wire.fleet.messages import Kind

_log = logging.getLogger(__name__)

_CONNECT_S, _READ_S = 10.0, 600.0
_MAX_MODELS_BYTES = 1024 * 1024
# The sizes of each request that measures the rates.
_TRIAL_TOKENS, _TRIAL_PROMPT = 24, 512
_TRIAL_WORD = "Count."
_UPSTREAM = "give the URL of a server with OpenAI's API, and its key if it needs one"


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """Hold an answer with its headers; `body` is read as it comes."""

    status: int
    content_type: str
    body: AsyncIterator[bytes]

    @property
    def head(self) -> AnswerHead:
        """Return the status and the content type."""
        return AnswerHead(self.status, self.content_type)


def checked_base(url: str) -> str:
    """Return an engine's URL without the /v1 at its end. Raises `ConfigError` if it is none of HTTP."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(
            f"the upstream {without_userinfo(url)!r} is no URL of HTTP", hint="http://127.0.0.1:8000"
        )
    return base


class Upstream:
    """Be the client of one engine. ``url`` may end with /v1."""

    def __init__(self, url: str, api_key: str | None = None, certificate: str | None = None) -> None:
        """Make the client. ``certificate`` is a file with the only certificate that the engine may show.

        The first certificate of the file counts, whatever name is in it. Raises `IdentityError` for a file
        without one.
        """
        base = checked_base(url)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._pin = None if certificate is None else _Pin(certificate)
        self._client = httpx.AsyncClient(
            base_url=base,
            headers=headers,
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            verify=True if self._pin is None else self._pin.context,
            # Proxies and keys of the environment are not meant for the engine.
            trust_env=False,
        )

    async def models(self) -> dict[str, int]:
        """Return the models with their context lengths.

        Raises `ProviderError` for no answer, or an invalid one.
        """
        self._look()
        try:
            response = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            place = self._client.base_url.copy_with(username=None, password=None)
            raise ProviderError(
                f"the engine at {place} does not answer: {why_unreachable(error)}",
                hint="start it first, or name another: convoy provide --upstream URL",
            ) from None
        try:
            if response.status_code != 200 or len(response.content) > _MAX_MODELS_BYTES:
                raise ProviderError(
                    f"the upstream answers {response.status_code} to /v1/models", hint=_UPSTREAM
                )
            listed = msgspec.json.decode(response.content)["data"]
            return {str(one["id"]): int(one.get("max_model_len") or 4096) for one in listed}
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            raise ProviderError("the upstream's /v1/models lists no models", hint=_UPSTREAM) from None

    @asynccontextmanager
    async def ask(self, kind: Kind, body: bytes, trace: str = "") -> AsyncIterator[UpstreamAnswer]:
        """Yield an answer. Its connection ends with the context. ``trace`` is a traceparent for the engine.

        Raises `ProviderError` if no answer comes.
        """
        self._look()
        headers = {"content-type": "application/json"} | ({"traceparent": trace} if trace else {})
        request = self._client.build_request("POST", APIS[kind].path, content=body, headers=headers)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise ProviderError(f"the upstream does not answer: {type(error).__name__}") from None
        try:
            kind_of = response.headers.get("content-type", "application/json")
            yield UpstreamAnswer(response.status_code, kind_of, _body(response))
        finally:
            await response.aclose()

    async def measure(self, model: str, max_context: int, slots: int) -> Capacity:
        """Measure the rates of ``model`` by a few requests.

        Raises `ProviderError` if one of them is not answered.
        """
        prompt = " ".join(["word"] * min(_TRIAL_PROMPT, max(1, max_context // 4)))
        read_s, read = await self._trial(model, prompt, 1)
        prefill_rate = max(1.0, max(1, read.prompt_tokens) / read_s)
        alone_s, alone = await self._trial(model, _TRIAL_WORD, _TRIAL_TOKENS)
        began = time.perf_counter()
        trials = (self._trial(model, _TRIAL_WORD, _TRIAL_TOKENS) for _ in range(slots))
        together = await asyncio.gather(*trials)
        all_s = time.perf_counter() - began
        return Capacity(
            slots=slots,
            decode_rate=max(0.01, max(1, alone.completion_tokens) / alone_s),
            batch_rate=max(0.01, sum(max(1, one.completion_tokens) for _, one in together) / all_s),
            prefill_rate=prefill_rate,
            max_context=max_context,
            # The trial prompt is one word, so all other tokens are the template's.
            template_tokens=min(MAX_TEMPLATE_TOKENS, max(0, alone.prompt_tokens - 1)),
        )

    async def _trial(self, model: str, prompt: str, max_tokens: int) -> tuple[float, EventReader]:
        """Return the seconds that an answer took, and its counts."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        began = time.perf_counter()
        async with self.ask("chat", msgspec.json.encode(body)) as answer:
            data = b"".join([piece async for piece in answer.body])
        if answer.status != 200:
            raise ProviderError(
                f"the upstream answers {answer.status} to a request of a few tokens",
                hint="try a chat at the engine itself: its log has the reason",
            )
        reader = EventReader("chat", stream=False)
        reader.whole(data)
        return max(1e-6, time.perf_counter() - began), reader

    def _look(self) -> None:
        if self._pin is not None:
            self._pin.look()

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()


async def _body(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in response.aiter_raw():
            yield piece
    except httpx.HTTPError as error:
        raise ProviderError(f"the upstream broke off: {type(error).__name__}") from None


class _Pin:
    """Trust the certificate in ``file``, and beside it a renewed one once the file has that.

    The older one is trusted until it expires, because a head shows it until it reads its files again.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._stamp = _stamp(file)
        self.context = _pinned(file)

    def look(self) -> None:
        """Read the file again if it changed. A file that cannot be used is logged once."""
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            _pinned(self._file, self.context)
        except (OSError, ConvoyError) as error:
            _log.warning("the engine's certificate is not read again class=%s", type(error).__name__)


def _stamp(file: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _pinned(certificate: str, known: ssl.SSLContext | None = None) -> ssl.SSLContext:
    context = known or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # The other certificates of the file are authorities. Trusting them would trust all that they sign.
    context.load_verify_locations(cadata=from_pem(Path(certificate).read_bytes()))
    return context
