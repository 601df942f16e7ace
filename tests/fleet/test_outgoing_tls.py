from __future__ import annotations

import asyncio
import socket
import ssl

import httpx
import pytest

from convoy.fleet.outgoing_tls import why_unreachable


async def refused() -> BaseException:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # no process listens there
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.HTTPError) as caught:
                await client.get(f"http://127.0.0.1:{one.getsockname()[1]}")
    return caught.value


@pytest.mark.outside
def test_a_reason_is_said_in_words_whichever_library_gave_it() -> None:
    assert "refused" in why_unreachable(ConnectionRefusedError(111, "Connection refused"))
    said = why_unreachable(asyncio.run(refused()))
    assert said[0].islower()
    assert "Error" not in said
    assert why_unreachable(httpx.ReadTimeout("")) == why_unreachable(TimeoutError())
    assert why_unreachable(socket.gaierror(-2, "Name or service not known")) == "its name is not known"
    assert why_unreachable(ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] oops")).startswith("TLS: ")
    assert why_unreachable(RuntimeError("whatever")) == "the connection ended"
