"""Read a request's body within bounds of bytes and time, if its headers say that it is JSON."""

from __future__ import annotations

import asyncio
import re

from starlette.datastructures import Headers
from starlette.types import Receive

from convoy.api.body.intake import Upload
from convoy.api.listen.options import ServeOptions
from convoy.api.refusals import BodyTooLong, BodyTooSlow, ClientGone, WrongMediaType

_JSON = re.compile(r"application/([\w.+-]+\+)?json")
_DISCARD_FACTOR = 8


async def read_body(
    headers: Headers,
    receive: Receive,
    options: ServeOptions,
    media_type: str | None = None,
    *,
    upload: Upload | None = None,
    max_bytes: int | None = None,
) -> bytes:
    """Return the whole body, which must be JSON unless ``media_type`` names another type.

    ``upload`` reserves a place for a long body before it is read. ``max_bytes`` replaces the options' limit.
    Raises `BodyTooLong`, `BodyTooSlow`, `WrongMediaType`, `QueueFull` or `ClientGone`.
    """
    _check_media_type(headers, media_type)
    max_bytes = options.max_body_bytes if max_bytes is None else max_bytes
    length = headers.get("content-length", "")
    num_bytes = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
    too_long = num_bytes > max_bytes
    if upload is not None and not too_long:
        await upload.reserve(num_bytes)
    try:
        async with asyncio.timeout(options.body_timeout_s) as deadline:
            if too_long:
                await _discard(receive, max_bytes * _DISCARD_FACTOR)
            else:
                body = await _read(receive, max_bytes, upload, _Pace(deadline, upload, options))
                if body is not None:
                    return body
    except TimeoutError:
        is_long = upload is not None and upload.is_long
        rate = f", or at {options.min_body_bytes_per_s} bytes a second" if is_long else ""
        raise BodyTooSlow(f"the body did not arrive within {options.body_timeout_s:g} s{rate}") from None
    was = f"{length} bytes" if too_long else "longer"
    raise BodyTooLong(f"the body is {was}, and the limit is {max_bytes} bytes")


class _Pace:
    """Enforce the deadline of one body: its whole time, and a least rate while it holds a place."""

    def __init__(self, deadline: asyncio.Timeout, upload: Upload | None, options: ServeOptions) -> None:
        end_s = deadline.when()
        assert end_s is not None, "a body has a deadline"
        self._deadline, self._end_s, self._upload = deadline, end_s, upload
        self._grace_s, self._min_bytes_per_s = options.body_grace_s, options.min_body_bytes_per_s
        self._clock = asyncio.get_running_loop().time
        self._placed_s = self._clock()
        self.arrived(0)

    def arrived(self, num_bytes: int) -> None:
        """Set the deadline of the next part, after ``num_bytes`` have arrived."""
        end_s = self._end_s
        if self._upload is not None and self._upload.is_long:
            end_s = min(end_s, self._placed_s + self._grace_s + num_bytes / self._min_bytes_per_s)
        self._deadline.reschedule(end_s)

    async def reserve(self, upload: Upload, num_bytes: int) -> None:
        """Wait for a place. The wait has a limit of its own, so the body's time stands still."""
        left_s = self._end_s - self._clock()
        self._deadline.reschedule(None)
        await upload.reserve(num_bytes)
        self._placed_s = self._clock()
        self._end_s = self._placed_s + left_s


async def _read(receive: Receive, max_bytes: int, upload: Upload | None, pace: _Pace) -> bytes | None:
    """Return the body, or None if it is too long."""
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
        if upload is not None and upload.needs_place(size):
            # The body came without a length, and only now proves to be long.
            await pace.reserve(upload, size)
        pace.arrived(size)
        parts.append(part)
    return b"".join(parts)


async def _discard(receive: Receive, max_bytes: int) -> None:
    # A client that is cut off while it still sends may never see the answer. So read the rest, up to a bound.
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
