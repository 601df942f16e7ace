"""Hosts off loopback, and pages of other sites that were permitted."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.datastructures import Headers

from convoy.api.listen.options import ServeOptions
from convoy.api.listen.origins import Origins
from convoy.api.refusals import Forbidden
from convoy.errors import ConfigError
from support.fake_service import serving

PAGE = "https://chat.example"
AWAY = ServeOptions(host="0.0.0.0", allowed_hosts=("convoy.example", "*.wild.example"))  # noqa: S104 - not bound
LISTED = ["convoy.example:8765", "CONVOY.example", "a.wild.example", "localhost:1", socket.gethostname()]


@pytest.mark.parametrize("host", [*LISTED, "192.0.2.7:8765", "[2001:db8::1]:8765", "127.0.0.1"])
def test_off_loopback_addresses_and_listed_names_are_answered(host: str) -> None:
    Origins(AWAY).check_host(Headers({"host": host}))


@pytest.mark.parametrize(
    "host", ["evil.example", "a.b.wild.example", "wild.example", "192.0.2.7.evil.example", "[::1"]
)
def test_off_loopback_other_names_are_refused(host: str) -> None:
    with pytest.raises(Forbidden, match="does not answer to the host") as caught:
        Origins(AWAY).check_host(Headers({"host": host}))
    assert "--allowed-host" in str(caught.value.hint)


@pytest.mark.parametrize(
    "origin",
    ["*", "chat.example", "ftp://chat.example", "https://chat.example/path", "https://", "https://a@b"],
)
def test_an_origin_that_is_none_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="the origin"):
        ServeOptions(allowed_origins=(origin,)).check()


@pytest.mark.parametrize(
    "host",
    ["https://x.example/", "x.example:8765", "x.example/v1", "[::1]:80", "a@b", "a b", "*", "*.", ""],
)
def test_a_name_that_no_host_header_can_match_is_refused_at_the_start(host: str) -> None:
    with pytest.raises(ConfigError, match="the allowed host") as caught:
        ServeOptions(allowed_hosts=(host,)).check()
    assert "--allowed-host" in str(caught.value.hint)


@pytest.mark.parametrize(
    "host", ["x.example", "X.Example", "*.x.example", "192.0.2.7", "2001:db8::1", "[2001:db8::1]", "box_1"]
)
def test_a_name_or_an_address_may_be_allowed(host: str) -> None:
    ServeOptions(allowed_hosts=(host,)).check()


@pytest.mark.parametrize("given", [PAGE, f"{PAGE}/", f"{PAGE}:443", "HTTPS://Chat.Example"])
def test_a_permitted_page_may_read_answers_and_errors(given: str) -> None:
    options = ServeOptions(port=0, allowed_origins=(given,))
    headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    with serving(options=options) as running, httpx.Client(base_url=running.url) as http:
        for answer in (
            http.post("/v1/completions", json={"prompt": "a"}, headers=headers),
            http.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=headers),
            http.get("/v1/nothing", headers=headers),
        ):
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["vary"] == "origin"
            assert "access-control-allow-credentials" not in answer.headers
        other = http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers
        assert "access-control-allow-origin" not in http.get("/v1/models").headers


def test_a_permitted_page_gets_its_preflight_without_a_key() -> None:
    from convoy.api.keys.keys import KeyRing

    options = ServeOptions(port=0, allowed_origins=(PAGE,), keys=KeyRing.of("a-key-of-this-server"))
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with serving(options=options) as running, httpx.Client(base_url=running.url) as http:
        answer = http.options("/v1/completions", headers={"origin": PAGE, **asks})
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert (
            http.options("/v1/completions", headers={"origin": "https://evil.example", **asks}).status_code
            == 403
        )
        assert http.options("/v1/completions", headers=asks).status_code == 401
        refused = http.get("/v1/models", headers={"origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
