"""What a client with a key can put into a body: a refusal by name, and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from adversary.ledger import Row
from support.fake_service import Running, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DIGITS = b"9" * 5000
BODIES = {
    "a byte that is not UTF-8": [b'{"prompt": "\xff"}', b'{"\xff": 1}', b"\xff\xfe{\x00}\x00"],
    "a lone surrogate": [b'{"prompt": "\\ud800"}', b'{"\\udc00": 1}'],
    "numbers without end": [
        b'{"prompt": "a", "logit_bias": {"%s": 1}}' % DIGITS,
        b'{"prompt": "a", "seed": %s}' % DIGITS,
        b'{"prompt": "a", "max_tokens": %s}' % DIGITS[:4300],
        b'{"prompt": "a", "stop_token_ids": [%s]}' % DIGITS[:4300],
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": NaN}',
    ],
    "nesting without end": [b'{"prompt": ' + b"[" * 100_000, b'{"x": ' + b'{"a":' * 100_000],
    "rules that leave nothing to sample": [
        b'{"prompt": "a", "allowed_token_ids": [256], "min_tokens": 5}',
        b'{"prompt": "a", "allowed_token_ids": [65], "bad_words": ["A"]}',
        b'{"prompt": "a", "allowed_token_ids": []}',
        b'{"prompt": "a", "bad_words": [""]}',
    ],
    "fields that belong to another server": [
        b'{"prompt": "a", "lora": [{"id": 0}]}',
        b'{"prompt": "a", "kv_transfer_params": {"remote_host": "127.0.0.1"}}',
        b'{"prompt": "a", "vllm_xargs": {"x": 1}}',
        b'{"prompt": "a", "n_predict": 1000000}',
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.attack("bodies that no honest client sends", layer="http")
@pytest.mark.parametrize("kind", BODIES)
def test_a_hostile_body_is_refused_by_name_and_nobody_else_notices(
    server: Running, row: Row, kind: str
) -> None:
    with httpx.Client(base_url=server.url, timeout=90.0) as client:
        for body in BODIES[kind]:
            for path in (TEXT, CHAT):
                answer = client.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                row.tried(error["code"] or "invalid_request_error")
                assert len(error["message"]) < 400
        assert client.post(TEXT, json={"prompt": "a"}).status_code == 200
