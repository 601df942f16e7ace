"""Which engine a provider asks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from convoy.errors import ProviderError
from convoy.fleet.provider.upstream import Upstream
from support.fleet import MODEL, FakeEngine, engine_server
from support.tls import TestAuthority, TlsRelay


def test_of_a_file_with_a_whole_chain_the_first_certificate_alone_is_trusted(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    mine, other = authority.issue("mine"), authority.issue("other")
    chain = tmp_path / "chain.pem"
    chain.write_bytes(Path(mine[0]).read_bytes() + authority.file.read_bytes())

    async def models(port: int) -> dict[str, int]:
        upstream = Upstream(f"https://127.0.0.1:{port}", None, str(chain))
        try:
            return await upstream.models()
        finally:
            await upstream.close()

    with engine_server(FakeEngine()) as url:
        target = "127.0.0.1", urlsplit(url).port or 0
        right, wrong = TlsRelay((str(chain), mine[1]), target, None), TlsRelay(other, target, None)
        try:
            assert list(asyncio.run(models(right.port))) == [MODEL]
            with pytest.raises(ProviderError, match="does not answer: TLS: certificate verify failed"):
                asyncio.run(models(wrong.port))
        finally:
            right.close()
            wrong.close()
