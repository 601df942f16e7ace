"""Paths with slashes too many mean what their writers meant."""

from __future__ import annotations

import httpx
import pytest

from convoy.api.listen.paths import plain_path


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/", "/"),
        ("", "/"),
        ("///", "/"),
        ("/health/", "/health"),
        ("//v1//models///x/", "/v1/models/x"),
        ("/v1/models", "/v1/models"),
    ],
)
def test_a_path_loses_the_slashes_that_mean_nothing(path: str, plain: str) -> None:
    assert plain_path(path) == plain


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", "/v1//models", "/health/", "//health"])
def test_slashes_too_many_find_their_path(http: httpx.Client, path: str) -> None:
    assert http.get(f"{http.base_url}{path}").status_code == 200


def test_slashes_too_many_do_not_go_round_the_key() -> None:
    from convoy.api.keys.keys import KeyRing
    from convoy.api.listen.options import ServeOptions
    from support.fake_service import serving

    with serving(options=ServeOptions(port=0, keys=KeyRing.of("a-key-of-some-length"))) as running:
        assert httpx.get(f"{running.url}//health/").status_code == 200
        for path in ("//v1/models", "/health//../v1/models", "//health//v1"):
            assert httpx.get(f"{running.url}{path}").status_code in {401, 404}
        assert httpx.get(f"{running.url}//status/").status_code == 401
