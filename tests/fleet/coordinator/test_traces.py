"""Spans of real requests, as a collector gets them: one trace from the tool to the engine, and no text."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from convoy.api.listen.options import ServeOptions
from convoy.api.telemetry.otlp import OtlpTraces
from convoy.api.traces import read_traceparent
from convoy.fleet.books.keys import Scope
from convoy.fleet.books.price import Price
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.routing.dispatch import QueueLimits
from convoy.fleet.proxy.trust import Trust
from convoy.fleet.timing import SEGMENTS
from support.fake_service import serving
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question
from support.proxy import found_in, proxy
from support.waiting import wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SECRET = "the heron flies at midnight"


class CountingProcessor(SimpleSpanProcessor):
    """Count ``num_open``: spans that began and are not exported yet."""

    def __init__(self, exporter: SpanExporter) -> None:
        super().__init__(exporter)
        self._lock = threading.Lock()
        self.num_open = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        super().on_start(span, parent_context)
        with self._lock:
            self.num_open += 1

    def on_end(self, span: ReadableSpan) -> None:
        super().on_end(span)
        with self._lock:
            self.num_open -= 1


class Collector:
    """Collect the spans of each of a fleet's programs, by its service.name."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self._processors: list[CountingProcessor] = []

    def of(self, service: str) -> OtlpTraces:
        self._processors.append(CountingProcessor(self.exporter))
        return OtlpTraces(service, self._processors[-1])

    def clear(self) -> None:
        """Forget all spans, also those that a program ends behind the last byte of its answer."""
        self.settle()
        self.exporter.clear()

    def settle(self) -> None:
        """Return once every span that began is here."""
        wait_until(lambda: not any(processor.num_open for processor in self._processors))

    def spans(self, service: str) -> list[ReadableSpan]:
        found = self.exporter.get_finished_spans()
        return [span for span in found if span.resource.attributes["service.name"] == service]

    def requests(self, service: str) -> list[ReadableSpan]:
        """Return spans of requests without their parts, once there: they end behind a program's last byte."""
        wait_until(lambda: any(span.kind.name == "SERVER" for span in self.spans(service)))
        self.settle()
        return [span for span in self.spans(service) if span.kind.name == "SERVER"]

    def everything(self) -> bytes:
        return "".join(span.to_json() for span in self.exporter.get_finished_spans()).encode()


class TracedFleet:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.collector = Collector()
        options = CoordinatorOptions(
            instance="test",
            models={MODEL: ModelOptions(Price(1_000_000, 2_000_000), 64)},
            queue=QueueLimits(50, 40, 10.0),
            traces=self.collector.of("coordinator"),
        )
        self.fleet = FleetUnderTest(folder, options)
        stack.callback(self.fleet.close)
        self.engine = FakeEngine()
        url = stack.enter_context(engine_server(self.engine))
        self.fleet.add("one", url, traces=self.collector.of("provider"))
        trust = Trust(frozenset(self.fleet.identities))
        traces = self.collector.of("proxy")
        self.proxy = stack.enter_context(proxy(self.fleet.url, self.fleet.key, trust, traces=traces))


@pytest.fixture(scope="module")
def _traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedFleet]:
    with ExitStack() as stack:
        yield TracedFleet(tmp_path_factory.mktemp("traced"), stack)


@pytest.fixture
def traced(_traced: TracedFleet) -> TracedFleet:
    _traced.collector.clear()
    _traced.engine.trouble.clear()
    _traced.engine.traceparents.clear()
    return _traced


def ask(traced: TracedFleet, url: str, parent: str = PARENT, key: str = "", **more: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key or traced.fleet.key}", "traceparent": parent}
    body = question(20, 22, **more)
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30, trust_env=False)


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert parent.context is not None
    return span.parent is not None and span.parent.span_id == parent.context.span_id


@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_goes_from_the_tool_through_proxy_coordinator_and_provider_to_the_engine(
    traced: TracedFleet, stream: bool
) -> None:
    assert ask(traced, traced.proxy, stream=stream).status_code == 200
    (through,), (routed,), (answered,) = (
        traced.collector.requests(name) for name in ("proxy", "coordinator", "provider")
    )
    assert [trace_of(span) for span in (through, routed, answered)] == [TRACE] * 3
    assert through.parent is not None
    assert f"{through.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert is_child(routed, through)
    assert is_child(answered, routed)
    assert answered.context is not None
    (seen,) = traced.engine.traceparents
    assert read_traceparent(seen) == (answered.context.trace_id, answered.context.span_id, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_coordinators_span_has_all_nine_segments_and_who_did_how_much(
    traced: TracedFleet, stream: bool
) -> None:
    assert ask(traced, traced.fleet.url, stream=stream).status_code == 200
    (span,) = traced.collector.requests("coordinator")
    said = dict(span.attributes or {})
    assert span.name == f"chat {MODEL}"
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", MODEL)
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (14, 2)
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.stream"]) == (64, stream)
    assert (said["convoy.provider"], said["convoy.outcome"]) == ("one", "complete")
    assert said["convoy.sealed"] == "by-coordinator"
    times = {name: said[f"convoy.timing.{name}_us"] for name in SEGMENTS}
    assert all(isinstance(us, int) for us in times.values())
    assert times["queue_wait"] == 0
    parts = {one.name: one for one in traced.collector.spans("coordinator") if one is not span}
    spent = {name for name in SEGMENTS if times[name]} - {"total_e2e"}
    assert set(parts) == spent
    assert span.start_time is not None
    assert span.end_time is not None
    for part in parts.values():
        assert is_child(part, span)
        assert part.start_time is not None
        assert part.end_time is not None
        assert span.start_time <= part.start_time <= part.end_time <= span.end_time + 10**6


def test_a_providers_span_says_when_its_engine_its_first_token_and_its_last_came(traced: TracedFleet) -> None:
    ask(traced, traced.fleet.url, stream=True)
    (span,) = traced.collector.requests("provider")
    parts = [one.name for one in traced.collector.spans("provider") if one is not span]
    assert parts == ["engine", "first_token", "decode"]
    said = dict(span.attributes or {})
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (14, 2)
    assert said["convoy.outcome"] == "complete"


def test_tries_and_failures_are_in_the_span(traced: TracedFleet) -> None:
    traced.engine.trouble[:] = ["busy"]
    assert ask(traced, traced.fleet.url).status_code == 200
    (span,) = traced.collector.requests("coordinator")
    assert dict(span.attributes or {})["convoy.tries"] == 2
    refused, answered = traced.collector.requests("provider")
    assert dict(refused.attributes or {})["convoy.outcome"] == "full"
    assert dict(answered.attributes or {})["convoy.outcome"] == "complete"
    traced.collector.clear()
    traced.engine.trouble[:] = ["cut"]
    ask(traced, traced.fleet.url, stream=True)
    (broken,) = traced.collector.requests("coordinator")
    assert broken.status.status_code is StatusCode.ERROR
    assert dict(broken.attributes or {})["error.type"] == "ProviderFailed"


def test_an_account_without_balance_makes_a_span_and_who_has_no_key_makes_none(traced: TracedFleet) -> None:
    fleet = traced.fleet
    fleet.ledger.open_account("poor")
    assert ask(traced, fleet.url, key="nobody").status_code == 401
    assert ask(traced, fleet.url, model="other").status_code == 404
    assert ask(traced, fleet.url, key=fleet.directory.make_key(Scope.CONSUMER, "poor")).status_code == 402
    (span,) = traced.collector.requests("coordinator")
    assert dict(span.attributes or {})["convoy.provider"] == ""
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    "parent",
    ["", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", PARENT + "-", PARENT.upper(), SECRET, "x" * 5000],
)
def test_a_traceparent_that_is_none_begins_a_trace_and_goes_nowhere(traced: TracedFleet, parent: str) -> None:
    assert ask(traced, traced.proxy, parent).status_code == 200
    (span,) = traced.collector.requests("proxy")
    assert span.parent is None
    assert trace_of(traced.collector.requests("provider")[0]) == trace_of(span) != TRACE
    assert parent == "" or parent.encode() not in traced.collector.everything()


def test_who_asks_for_no_sampling_gets_none(traced: TracedFleet) -> None:
    assert ask(traced, traced.fleet.url, PARENT[:-1] + "0").status_code == 200
    assert ask(traced, traced.fleet.url, PARENT[:-1] + "1").status_code == 200
    (_,) = traced.collector.requests("coordinator")


def test_no_prompt_answer_key_or_account_is_in_any_span(traced: TracedFleet) -> None:
    body = question(52713391, 19282736, user=SECRET)
    body["messages"][0]["content"] += f" {SECRET}"
    headers = {"authorization": f"Bearer {traced.fleet.key}"}
    for url in (traced.fleet.url, traced.proxy):
        for stream in (False, True):
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={**body, "stream": stream},
                headers={
                    **headers,
                    "baggage": f"user={SECRET}",
                    "tracestate": "vendor=heron",
                    "idempotency-key": f"{SECRET} {stream}",
                },
                timeout=30,
                trust_env=False,
            )
            assert answer.status_code == 200
    traced.engine.trouble[:] = ["refuses"]
    assert ask(traced, traced.fleet.url).status_code == 400
    assert ask(traced, traced.fleet.url, model=SECRET).status_code == 404
    assert ask(traced, traced.proxy, model=SECRET).status_code == 404
    wait_until(lambda: traced.collector.everything().count(b"SpanKind.SERVER") == 4 + 6 + 2 + 1)
    spans = traced.collector.everything()
    private = [SECRET, "heron", "52713391", "71996127", traced.fleet.key, '"ann"', "lease-"]
    assert {text: found_in(spans, text) for text in private} == {text: [] for text in private}
    assert found_in(spans, MODEL) == []  # too short to look for
    assert MODEL.encode() in spans


def test_a_head_says_how_long_it_read_waited_ran_the_prompt_and_decoded() -> None:
    collector = Collector()
    body = {"model": "fake", "messages": [{"role": "user", "content": SECRET}]}
    with serving(options=ServeOptions(port=0, traces=collector.of("head"))) as server:
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=body, headers={"traceparent": PARENT}, trust_env=False
        )
        assert answer.status_code == 200
        (span,) = collector.requests("head")
    assert trace_of(span) == TRACE
    usage, said = answer.json()["usage"], dict(span.attributes or {})
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    parts = [one.name for one in collector.spans("head") if one is not span]
    assert parts == ["read", "queue", "prefill", "decode"]
    assert found_in(collector.everything(), SECRET) == []


@pytest.mark.long
def test_without_the_package_traces_are_refused_and_all_else_runs(tmp_path: Path) -> None:
    """Nothing imports OpenTelemetry before it is asked for."""
    key_file = tmp_path / "api.key"
    key_file.touch(mode=0o600)
    key_file.write_text("sk-test\n", encoding="utf-8")
    script = """
import sys
import threading
sys.modules["opentelemetry"] = None
import convoy.cli.main, convoy.fleet.coordinator.server, convoy.fleet.proxy.server, convoy.api.app
from convoy.fleet.provider.run import run_provider
sys.exit(convoy.cli.main.run(["proxy", "http://127.0.0.1:1", "--api-key-file", sys.argv[1],
                              "--trust-provider", "00" * 32, "--traces", "http://127.0.0.1:4318"]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, key_file], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 78
    assert "traces need the packages of OpenTelemetry" in ran.stderr
    assert "pip install 'WHEEL[telemetry]'" in ran.stderr
