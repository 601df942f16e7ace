"""An answer's count of tokens that were not run again, and the sharing of prompts between keys."""

from __future__ import annotations

import httpx
import pytest

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from support.fake_service import FakeEngine, events, serving

CHAT = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
TEXT = {"prompt": ["abc", "abd"], "n": 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "cached"), [("chat/completions", CHAT, 5), ("completions", TEXT, 10)]
)
def test_usage_counts_the_cached_tokens_of_each_prompt_once(
    path: str, body: dict[str, object], cached: int, stream: bool
) -> None:
    engine = FakeEngine()
    engine.cached_tokens = 5
    asked = {**body, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    with serving(engine) as running:
        answer = httpx.post(f"{running.url}/v1/{path}", json=asked, timeout=60.0)
        usage = events(answer.text)[-2]["usage"] if stream else answer.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


def test_each_api_key_has_a_salt_of_its_own_that_is_not_the_key() -> None:
    salts = []
    for key in ("the-one-key-of-many", "another-key-of-many", None):
        with serving(options=ServeOptions(port=0, keys=None if key is None else KeyRing.of(key))) as running:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for _ in range(2):
                answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"}, headers=headers)
                assert answer.status_code == 200
            first, second = (handle.request.cache_salt for handle in running.engine.handles)
            assert first == second
            assert key is None or key.encode() not in first
            salts.append(first)
    assert len(set(salts)) == 3


def test_requests_under_one_key_are_kept_apart_by_their_cache_salt() -> None:
    with serving(options=ServeOptions(port=0, keys=KeyRing.of("the-one-key-of-many"))) as running:
        for salt in (None, "ann", "bob", "ann"):
            body = {"prompt": "a", "cache_salt": salt}
            headers = {"Authorization": "Bearer the-one-key-of-many"}
            assert httpx.post(f"{running.url}/v1/completions", json=body, headers=headers).status_code == 200
        none, ann, bob, again = (handle.request.cache_salt for handle in running.engine.handles)
    assert ann == again
    assert len({none, ann, bob}) == 3
