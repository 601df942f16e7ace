"""Reading a request's body: bounded in bytes and in time, and only where it says that it is JSON."""

from __future__ import annotations

import asyncio
import re

from starlette.datastructures import Headers
from starlette.types import Receive

from convoy.serve.options import ServeOptions
from convoy.serve.refusals import BodyTooLong, BodyTooSlow, ClientGone, WrongMediaType

_JSON = re.compile(r"application/([\w.+-]+\+)?json")
_DISCARD_FACTOR = 8


async def read_body(
    headers: Headers, receive: Receive, options: ServeOptions, media_type: str | None = None
) -> bytes:
    """The whole body, JSON unless it is to be of another ``media_type``.

    Raises `BodyTooLong`, `BodyTooSlow`, `WrongMediaType` or `ClientGone`.
    """
    _check_media_type(headers, media_type)
    length = headers.get("content-length", "")
    too_long = length.isdigit() and int(length) > options.max_body_bytes
    try:
        async with asyncio.timeout(options.body_timeout_s):
            if too_long:
                await _discard(receive, options.max_body_bytes * _DISCARD_FACTOR)
            else:
                body = await _read(receive, options.max_body_bytes)
                if body is not None:
                    return body
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {options.body_timeout_s:g} s") from None
    was = f"{length} bytes" if too_long else "longer"
    raise BodyTooLong(f"the body is {was}, and the limit is {options.max_body_bytes} bytes")


async def _read(receive: Receive, max_bytes: int) -> bytes | None:
    """The body, or None if it is too long."""
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        part, more = await _next_part(receive)
        size += len(part)
        if size > max_bytes:
            if more:
                await _discard(receive, max_bytes * _DISCARD_FACTOR)
            return None
        parts.append(part)
    return b"".join(parts)


async def _discard(receive: Receive, max_bytes: int) -> None:
    # A client that is cut off while it still sends may never see the answer, so take the rest, within reason.
    more, seen = True, 0
    while more and seen < max_bytes:
        part, more = await _next_part(receive)
        seen += len(part)


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


def _check_media_type(headers: Headers, expected: str | None) -> None:
    kind = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != expected if expected else not _JSON.fullmatch(kind):
        expected = expected or "application/json"
        raise WrongMediaType(
            f"the body's content type is {kind[:80]!r}, expected {expected}",
            hint=f'send the header "Content-Type: {expected}"',
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise WrongMediaType(f"the body's content encoding is {encoding[:80]!r}, expected none")
