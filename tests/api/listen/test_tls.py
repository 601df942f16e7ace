"""A server that ends TLS itself, and a certificate that is replaced while it runs."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from convoy.api.listen.options import ServeOptions
from convoy.api.listen.tls import check_certificate
from convoy.errors import ConfigError, ProviderError
from convoy.fleet.provider.upstream import Upstream
from support.fake_service import serving
from support.tls_files import make_tls_files
from support.waiting import wait_until


def trusting(certificate: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


def certificate_at(url: str) -> str:
    return ssl.get_server_certificate(("127.0.0.1", int(url.rsplit(":", 1)[1])))


def test_a_key_that_others_can_read_is_refused_with_its_mode(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)
    Path(tls[1]).chmod(0o644)
    with pytest.raises(ConfigError, match=r"the TLS key .*tls\.key has mode 0644, expected 0600"):
        check_certificate(tls)


def test_a_server_with_a_certificate_answers_https_alone(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)
    with serving(options=ServeOptions(port=0, tls=tls)) as running:
        assert running.url.startswith("https://127.0.0.1:")
        answer = httpx.post(
            f"{running.url}/v1/completions", json={"prompt": "a"}, verify=trusting(tls[0]), timeout=20.0
        )
        assert answer.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(running.url.replace("https", "http") + "/health")


def test_a_reload_shows_the_new_certificate_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)
    with serving(options=ServeOptions(port=0, tls=tls)) as running:
        first = certificate_at(running.url)
        make_tls_files(tmp_path)
        assert certificate_at(running.url) == first
        assert running.stop.request_reload()
        while (second := certificate_at(running.url)) == first:
            pass
        Path(tls[1]).write_text("no key\n", encoding="utf-8")
        assert running.stop.request_reload()
        for _ in range(3):
            assert certificate_at(running.url) == second


def test_a_provider_beside_a_head_trusts_its_certificate_alone(tmp_path: Path) -> None:
    mine, other = make_tls_files(tmp_path), make_tls_files(tmp_path / "other")
    with serving(options=ServeOptions(port=0, tls=mine)) as running:

        async def models(certificate: str) -> dict[str, int]:
            upstream = Upstream(running.url, None, certificate)
            try:
                return await upstream.models()
            finally:
                await upstream.close()

        assert list(asyncio.run(models(mine[0]))) == ["fake"]
        with pytest.raises(ProviderError):
            asyncio.run(models(other[0]))


def test_a_provider_beside_a_head_takes_a_renewed_certificate(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)
    body = msgspec.json.encode({"model": "fake", "messages": [{"role": "user", "content": "a"}]})
    with serving(options=ServeOptions(port=0, tls=tls)) as running:

        async def ask() -> None:
            upstream = Upstream(running.url, None, tls[0])
            try:
                async with AsyncExitStack() as held:

                    async def connect() -> None:
                        # An answer that is not read keeps its connection, so the next one needs another.
                        answer = await held.enter_async_context(upstream.ask("chat", body))
                        assert answer.status == 200

                    await connect()
                    first = certificate_at(running.url)
                    make_tls_files(tmp_path)
                    # The file has the new certificate, and the head still shows the old one.
                    await connect()
                    assert running.stop.request_reload()
                    await asyncio.to_thread(wait_until, lambda: certificate_at(running.url) != first)
                    await connect()
                    Path(tls[0]).write_text("no PEM\n", encoding="utf-8")
                    await connect()
            finally:
                await upstream.close()

        asyncio.run(ask())


@pytest.mark.parametrize("wrong", ["missing", "other key", "no PEM"])
def test_files_that_are_no_certificate_and_key_are_refused_by_name(tmp_path: Path, wrong: str) -> None:
    certificate, key = make_tls_files(tmp_path)
    if wrong == "missing":
        Path(key).unlink()
    elif wrong == "other key":
        key = make_tls_files(tmp_path / "other")[1]
    else:
        Path(certificate).write_text("hello\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tls\.(crt|key)"):
        ServeOptions(tls=(certificate, key)).check()


def test_off_loopback_tls_or_a_warning() -> None:
    away = {"host": "192.0.2.1", "allow_unauthenticated": True}
    assert ServeOptions(**away).in_clear  # type: ignore[arg-type]
    assert not ServeOptions(**away, tls=("a", "b")).in_clear  # type: ignore[arg-type]
    assert not ServeOptions().in_clear
