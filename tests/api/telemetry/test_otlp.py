"""Spans as a collector gets them by OTLP over HTTP, and the collectors that are refused."""

from __future__ import annotations

import pytest

from convoy.api.telemetry.otlp import OtlpTraces, traces_url
from convoy.errors import ConfigError
from support.otlp import collecting

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def test_a_collector_gets_spans_by_otlp_over_http() -> None:
    with collecting() as collector:
        traces = OtlpTraces.to(collector.url, "convoy-test")
        span = traces.begin("completion", "m", PARENT, ago_s=1.0)
        span.part("first_token", 0.25, 0.75)
        span.end("complete")
        span.end("again")
        traces.close()
    ((path, _),) = collector.posted
    assert path == "/v1/traces"
    (_, part), (service, whole) = collector.spans()
    assert service == "convoy-test"
    assert (part.name, whole.name, whole.trace_id.hex()) == ("first_token", "text_completion m", TRACE)
    assert part.end_time_unix_nano - part.start_time_unix_nano == 500_000_000
    assert whole.end_time_unix_nano - whole.start_time_unix_nano >= 1_000_000_000


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://collector.example:4318", "without TLS"),
        ("ftp://127.0.0.1", "no URL"),
        ("127.0.0.1:4318", "no URL"),
        ("http://user:hidden-word@127.0.0.1:4318", "no URL"),
    ],
)
def test_a_collector_that_cannot_be_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        traces_url(url)
    assert "hidden-word" not in caught.value.message
    assert (
        traces_url("https://collector.example/otlp/v1/traces") == "https://collector.example/otlp/v1/traces"
    )
