"""The samples of a scrape, read by the library that made Prometheus' format."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """Hold samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.kinds, f"{family.name} is there twice"
            self.kinds[family.name] = family.type
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.samples, f"{key} is there twice"
                self.samples[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """Return the one sample of that name with these labels, and perhaps others."""
        wanted = labels.items()
        found = [value for (one, has), value in self.samples.items() if one == name and wanted <= has]
        assert len(found) == 1, f"{len(found)} samples are {name} {labels}"
        return found[0]

    def has(self, name: str, **labels: str) -> bool:
        return any(one == name and labels.items() <= has for one, has in self.samples)


def scrape(url: str, key: str | None = None) -> Scrape:
    """Scrape ``url``, which ends in /metrics."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = httpx.get(url, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Scrape(answer.text)
