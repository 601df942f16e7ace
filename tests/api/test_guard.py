"""Admission to the server: keys, hosts, browsers."""

from __future__ import annotations

import logging

import httpx
import openai as sdk
import pytest

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.api.server import run_server
from convoy.api.service import Service
from convoy.config.clear_text import is_loopback
from convoy.errors import ConfigError
from support.fake_service import serving

KEY = "sk-test-0123456789"


def test_a_key_is_asked_for_everywhere_but_at_health() -> None:
    with (
        serving(options=ServeOptions(port=0, keys=KeyRing.of(KEY))) as running,
        httpx.Client(base_url=running.url) as http,
    ):
        assert http.get("/health").status_code == 200
        for path in ("/v1/models", "/status", "/v1/nothing", "/"):
            assert http.get(path).status_code == 401, path
        for header in (
            "",
            KEY,
            f"Basic {KEY}",
            "Bearer",
            f"Bearer {KEY}x",
            f"Bearer {KEY[:-1]}",
            "Bearer é",
        ):
            headers = {"authorization": header.encode()}
            answer = http.post("/v1/completions", json={"prompt": "a"}, headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 401, header
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert KEY not in answer.text
        assert http.get("/v1/models", headers={"authorization": f"bearer {KEY}"}).status_code == 200
        assert not running.engine.handles


def test_the_client_says_so_when_its_key_is_wrong() -> None:
    with serving(options=ServeOptions(port=0, keys=KeyRing.of(KEY))) as running:
        wrong = sdk.OpenAI(base_url=f"{running.url}/v1", api_key="wrong", max_retries=0)
        with wrong, pytest.raises(sdk.AuthenticationError):
            wrong.models.list()
        with sdk.OpenAI(base_url=f"{running.url}/v1", api_key=KEY) as client:
            assert [model.id for model in client.models.list()] == ["fake"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1", "10.0.0.1"]
)
def test_a_name_that_is_not_this_machine_is_refused(http: httpx.Client, host: str) -> None:
    answer = http.get("/v1/models", headers={"host": host})
    assert answer.status_code == 403
    assert "does not answer to the host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "127.0.0.2:9", "[::1]:80"])
def test_names_of_this_machine_are_answered(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_further_name_can_be_allowed() -> None:
    with serving(options=ServeOptions(port=0, allowed_hosts=("Convoy.test",))) as running:
        assert httpx.get(f"{running.url}/status", headers={"host": "convoy.test:80"}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://[::1", "file://"]
)
def test_a_page_of_another_site_is_refused(http: httpx.Client, origin: str) -> None:
    body = {"prompt": "a"}
    answer = http.post("/v1/completions", json=body, headers={"origin": origin, "host": "localhost:5"})
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_page_of_this_site_is_answered(http: httpx.Client) -> None:
    headers = {"origin": "http://localhost:5", "host": "localhost:5"}
    assert http.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
    assert http.get("/v1/models", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert http.get("/v1/models", headers={"sec-fetch-site": "cross-site"}).status_code == 403


def test_a_preflight_gets_no_permission(http: httpx.Client) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = http.options("/v1/completions", headers=headers)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["::", "192.0.2.1", "192.168.1.5", "myhost", ""])
def test_off_loopback_without_a_key_is_refused(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="without an api key") as caught:
        ServeOptions(host=host).check()
    assert caught.value.hint is not None
    ServeOptions(host=host, allow_unauthenticated=True).check()
    ServeOptions(host=host, keys=KeyRing.of(KEY)).check()


def test_the_server_itself_refuses_unsafe_options() -> None:
    service = Service(models=(), health=lambda: (True, ""), status=dict)
    with pytest.raises(ConfigError):
        run_server(service, ServeOptions(host="192.0.2.1", port=0))


@pytest.mark.parametrize("key", ["", "two words", "ключ", "a\nb", "fifteen-letters"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api key"):
        KeyRing.of(key)


def test_nothing_private_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    options = ServeOptions(port=0, keys=KeyRing.of(KEY), access_log=True)
    assert KEY not in repr(options)
    with serving(options=options) as running:
        headers = {"authorization": f"Bearer {KEY}"}
        ask = {"messages": [{"role": "user", "content": "my diary says xyzzy"}], "logprobs": True}
        url = f"{running.url}/v1/chat/completions?token=plugh"
        assert httpx.post(url, json=ask, headers=headers).status_code == 200
        assert httpx.post(url, json={**ask, "stream": True}, headers=headers).status_code == 200
        assert httpx.post(url, json={**ask, "temperature": 99}, headers=headers).status_code == 400
        running.engine.refuse = ValueError("xyzzy")
        assert httpx.post(url, json=ask, headers=headers).status_code == 500
    ours = "\n".join(
        r.getMessage() for r in caplog.records if r.name.startswith(("convoy", "uvicorn", "asyncio"))
    )
    for private in ("xyzzy", "plugh", KEY, "answer is", "120, 121", "diary"):
        assert private not in ours, private
    assert "path=/v1/chat/completions status=200" in ours
    assert "prompt_tokens=36" in ours
    assert "class=ValueError" in ours
