"""The page over HTTP: its headers, sessions from tokens, and what sessions and keys may do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.page.rights import PageRights
from convoy.api.page.sessions import SESSION_LIFE_S
from convoy.api.page.tokens import OpenTokens, Scope
from support.fake_service import serving

pytestmark = pytest.mark.outside

KEY = "sk-test-0123456789"
AS_KEY = {"authorization": f"Bearer {KEY}"}
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"


@dataclass
class Page:
    """Hold a server with a page and a key, its tokens, and the clock of its sessions."""

    url: str
    tokens: OpenTokens
    time_s: list[float]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, scope: Scope | None = None) -> httpx.Client:
        """Return a client, with a session if ``scope`` is given."""
        cookies = None
        if scope is not None:
            token = self.tokens.make(self.port, scope)
            answer = httpx.post(f"{self.url}/page/session", json={"token": token})
            assert answer.status_code == 200, answer.text
            cookies = answer.cookies
        return httpx.Client(base_url=self.url, timeout=60.0, cookies=cookies)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder: Path = tmp_path_factory.mktemp("cache") / "open"
    time_s = [0.0]
    options = PageOptions(tokens=folder, clock=lambda: time_s[0])
    with serving(options=ServeOptions(port=0, keys=KeyRing.of(KEY), page=options)) as running:
        yield Page(running.url, OpenTokens(folder), time_s)


def test_files_need_no_key_and_carry_the_safe_headers(page: Page) -> None:
    with page.client() as http:
        for path in ("/", "/page/static/page.js", "/page/static/vendor/purify.js"):
            answer = http.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert http.head("/").status_code == 200
        for path in ("nothing.js", "../rights.py", "%2e%2e/rights.py", "vendor", "vendor/libraries.toml"):
            assert http.get(f"/page/static/{path}").status_code in {401, 404}, path


def test_without_a_session_or_a_key_nothing_of_the_cluster_is_shown(page: Page) -> None:
    with page.client() as http:
        for path in ("/status", "/metrics", "/page/session", "/v1/models"):
            assert http.get(path).status_code == 401, path
        assert http.delete("/page/sessions").status_code == 401


def test_a_token_begins_one_session_in_a_strict_cookie(page: Page) -> None:
    token = page.tokens.make(page.port, "operate")
    with page.client() as http:
        answer = http.post("/page/session", json={"token": token})
        assert answer.json() == {"scope": "operate", "needs_key": True, "server": "head"}
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"convoy-{page.port}=")
        assert cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
        assert http.get("/page/session").json()["scope"] == "operate"
        assert http.get("/status").status_code == 200
    with page.client() as other:
        refused = other.post("/page/session", json={"token": token})
        assert refused.status_code == 401
        assert token not in refused.text
        assert "set-cookie" not in refused.headers


def test_a_session_looks_but_a_model_still_needs_the_key(page: Page) -> None:
    ask = {"messages": [{"role": "user", "content": "hi"}]}
    with page.client("operate") as http:
        assert http.get("/metrics").status_code == 200
        assert http.post("/v1/chat/completions", json=ask).status_code == 401
        assert http.post("/v1/chat/completions", json=ask, headers=AS_KEY).status_code == 200


def test_only_a_session_that_operates_may_operate(page: Page) -> None:
    with page.client() as http:
        refused = http.delete("/page/sessions", headers=AS_KEY)
        assert refused.status_code == 403
        assert "convoy open" in refused.json()["error"]["message"]
        assert http.get("/page/session", headers=AS_KEY).json()["scope"] == "use"
    with page.client("view") as viewer, page.client("operate") as operator:
        assert viewer.delete("/page/sessions").status_code == 403
        assert viewer.get("/status").status_code == 200
        assert operator.delete("/page/sessions").json()["ended"] >= 2
        assert viewer.get("/status").status_code == 401
        assert operator.get("/status").status_code == 401


def test_a_session_expires_and_can_be_ended(page: Page) -> None:
    with page.client("view") as http:
        page.time_s[0] += SESSION_LIFE_S
        assert http.get("/status").status_code == 401
    with page.client("view") as http:
        assert "Max-Age=0" in http.delete("/page/session").headers["set-cookie"]
        assert http.get("/status").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [{"origin": "https://evil.example"}, {"origin": "http://localhost:1"}, {"origin": "null"},
     {"sec-fetch-site": "same-site"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}],
)  # fmt: skip
def test_a_page_of_another_site_gets_nothing_even_with_the_cookie(
    page: Page, headers: dict[str, str]
) -> None:
    with page.client("operate") as http:
        for method, path in (("GET", "/status"), ("GET", "/"), ("DELETE", "/page/sessions")):
            answer = http.request(method, path, headers=headers)
            assert answer.status_code == 403, (method, path)
        assert http.get("/status").status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        ("{}", "application/json", 400),
        ("[", "application/json", 400),
        ('{"token": 1}', "application/json", 400),
        ('{"token": "o", "more": 1}', "application/json", 400),
        ('{"token": "o"}', "text/plain", 415),
        (f'{{"token": "{"o" * 2000}"}}', "application/json", 413),
        ('{"token": "o"}', "application/json", 401),
    ],
)
def test_a_body_that_is_no_token_is_refused(page: Page, content: str, kind: str, status: int) -> None:
    with page.client() as http:
        answer = http.post("/page/session", content=content, headers={"content-type": kind})
        assert answer.status_code in ({status, 429} if status == 401 else {status}), answer.text


def test_a_stream_of_the_status_ends_with_its_session(page: Page) -> None:
    accept = {"accept": "text/event-stream"}
    with page.client("operate") as http, http.stream("GET", "/status", headers=accept) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["model"] == "fake"
        assert http.delete("/page/sessions").status_code == 200
        # It ends by itself: the next line would otherwise be waited for until the time-out.
        assert not [line for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("accept", ["application/json, text/event-stream", "text/event-stream, */*", "*/*"])
def test_a_client_that_takes_json_too_gets_one_value(page: Page, accept: str) -> None:
    with page.client("view") as http:
        answer = http.get("/status", headers={"accept": accept})
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["model"] == "fake"


def test_a_permitted_site_may_not_use_its_readers_session(tmp_path: Path) -> None:
    tokens, site = OpenTokens(tmp_path / "open"), "http://localhost:3000"
    page = PageOptions(tokens=tokens.folder)
    options = ServeOptions(port=0, keys=KeyRing.of(KEY), page=page, allowed_origins=(site,))
    with serving(options=options) as running:
        token = tokens.make(int(running.url.rpartition(":")[2]), "operate")
        begun = httpx.post(f"{running.url}/page/session", json={"token": token})
        with httpx.Client(base_url=running.url, cookies=begun.cookies, headers={"origin": site}) as http:
            assert http.get("/status").status_code == 401
            assert http.delete("/page/sessions", headers=AS_KEY).status_code == 403
            assert http.get("/status", headers=AS_KEY).status_code == 200


def test_under_tls_the_cookie_is_secure_and_bound_to_the_host() -> None:
    rights = PageRights(ServeOptions(tls=("crt", "key"), page=PageOptions()))
    cookie = rights.cookie({"server": ("127.0.0.1", 8443)}, "secret")
    assert cookie == "__Host-convoy-8443=secret; Path=/; HttpOnly; SameSite=Strict; Secure"


def test_off_loopback_without_tls_there_is_no_page(tmp_path: Path) -> None:
    keys, token = KeyRing.of(KEY), OpenTokens(tmp_path / "open")
    options = ServeOptions(host="0.0.0.0", port=0, keys=keys, page=PageOptions(tokens=token.folder))  # noqa: S104
    with serving(options=options) as running, httpx.Client(base_url=running.url) as http:
        port = int(running.url.rpartition(":")[2])
        assert http.head("/").status_code == 200
        assert http.get("/").status_code == 401
        answer = http.get("/", headers=AS_KEY)
        assert answer.status_code == 404
        assert "needs TLS" in answer.json()["error"]["message"]
        begun = http.post("/page/session", json={"token": token.make(port, "operate")}, headers=AS_KEY)
        assert begun.status_code == 400
        assert "set-cookie" not in begun.headers
