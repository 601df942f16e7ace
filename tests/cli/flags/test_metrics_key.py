"""``--metrics-key-file``: a process that is scraped may ask for a key."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from convoy.cli.flags.metrics import serving_metrics
from convoy.cluster.metrics.families import gauge
from convoy.errors import ConfigError, UsageError

KEY = "the-key-of-prometheus"


def key_file(folder: Path, text: str = f"{KEY}\n", mode: int = 0o600) -> Path:
    file = folder / "scrape.key"
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return file


def test_a_scrape_without_the_key_reads_nothing(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    sources = lambda: [gauge("convoy_up", "It runs.", [({}, 1.0)])]  # noqa: E731
    with serving_metrics("127.0.0.1:0", key_file(tmp_path), sources, lambda *line: said.append(line)):
        ((_, url),) = said
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"x-api-key": "é"}):
            sent = {name: value.encode() for name, value in headers.items()}
            refused = httpx.get(url, headers=sent, trust_env=False)  # type: ignore[arg-type]
            assert (refused.status_code, refused.content) == (401, b"")
            assert refused.headers["www-authenticate"] == "Bearer"
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            found = httpx.get(url, headers=headers, trust_env=False)
            assert found.status_code == 200
            assert "convoy_up 1.0" in found.text


def test_a_key_without_metrics_or_one_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--metrics-key-file is for --metrics"):
        serving_metrics(None, key_file(tmp_path), list, print).__enter__()
    with pytest.raises(ConfigError, match="has mode 0644, expected 0600"):
        serving_metrics("127.0.0.1:0", key_file(tmp_path, mode=0o644), list, print).__enter__()
