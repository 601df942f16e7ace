"""A head and a peer that are scraped over HTTP while they answer: every number matches the requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from cluster.recovery.test_recovery import scene
from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.api.server import Stop, run_server
from convoy.cluster.metrics.member import peer_families
from convoy.cluster.metrics.server import metrics_server
from convoy.cluster.running import RunningCluster
from convoy.config.table import ServeConfig
from convoy.errors import ConfigError
from convoy.sdk.head import service_of
from support.cluster import PeerThread
from support.scraping import Scrape, scrape
from support.waiting import wait_until

NAME = "a-name-of-its-own"
KEY = "a-key-that-no-metric-holds"
SECRET = "Purple elephants juggle at 4 pm."


@contextmanager
def http(cluster: RunningCluster) -> Iterator[str]:
    service = service_of(cluster, ServeConfig(served_model_name=NAME))
    urls: list[str] = []
    up, stop = threading.Event(), Stop()

    def ready(url: str) -> None:
        urls.append(url)
        up.set()

    options = ServeOptions(port=0, keys=KeyRing.of(KEY), drain_s=5.0)
    thread = threading.Thread(target=lambda: run_server(service, options, on_ready=ready, stop=stop))
    thread.start()
    assert up.wait(20)
    try:
        yield urls[0]
    finally:
        stop.request()
        thread.join(20)


class Served:
    """Run a head over HTTP, and a peer with a port of its own to be scraped at."""

    def __init__(self, cluster: RunningCluster, url: str, peer: PeerThread, peer_url: str) -> None:
        self.cluster, self.url, self.peer, self._peer_url = cluster, url, peer, peer_url

    def ask(self, text: str, max_tokens: int = 6, **more: Any) -> dict[str, Any]:
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    def head(self) -> Scrape:
        return scrape(f"{self.url}/metrics", KEY)

    def beta(self) -> Scrape:
        return scrape(self._peer_url)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with scene("beta") as s, ExitStack() as stack:
        peer = s.join("beta")
        cluster = s.serve(spans={"alpha": "0:1,output", "beta": "2:3"}, recover_wait_s=0.0)
        url = stack.enter_context(http(cluster))
        source = partial(peer_families, peer.peer)
        peer_url = stack.enter_context(metrics_server([source], ("127.0.0.1", 0), frozenset({"127.0.0.1"})))
        yield Served(cluster, url, peer, peer_url)


def test_before_anybody_asked_everything_is_there_and_zero(served: Served) -> None:
    found = served.head()
    of = {"model_name": NAME}
    for name in ("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"):
        assert found(f"vllm:{name}", **of) == 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found(f"vllm:{name}", **of) == 0
        assert found.kinds[f"vllm:{name}"] == "gauge"
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
        assert found(f"vllm:{name}_seconds_count", **of) == 0
        assert found.kinds[f"vllm:{name}_seconds"] == "histogram"
    for why in ("stop", "length", "abort", "error"):
        assert found("vllm:request_success_total", finished_reason=why, **of) == 0
    assert found("convoy_ready") == found("convoy_member_up", member="beta") == 1
    assert found("vllm:cache_config_info", block_size="16", **of) == 1


def test_a_model_is_served_under_the_name_that_was_chosen(served: Served) -> None:
    assert served.ask("a", 1)["model"] == NAME
    listed = httpx.get(f"{served.url}/v1/models", headers={"authorization": f"Bearer {KEY}"}).json()
    assert [one["id"] for one in listed["data"]] == [NAME]


def test_tokens_requests_and_hops_are_what_was_asked(served: Served) -> None:
    before, peer_before = served.head(), served.beta()
    usages = [served.ask(f"{SECRET} {number}", 6, n=2)["usage"] for number in range(3)]
    after, peer_after = served.head(), served.beta()

    def grew(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    assert grew("vllm:prompt_tokens_total") == sum(one["prompt_tokens"] for one in usages)
    assert grew("vllm:generation_tokens_total") == sum(one["completion_tokens"] for one in usages) == 36
    assert grew("vllm:request_success_total", finished_reason="length") == 6
    assert grew("vllm:time_to_first_token_seconds_count") == 6
    assert grew("vllm:e2e_request_latency_seconds_count") == 6
    assert grew("vllm:request_queue_time_seconds_count") == 6
    assert grew("vllm:inter_token_latency_seconds_count") == 6 * 5
    queried = grew("vllm:prefix_cache_queries_total")
    assert queried == 2 * sum(one["prompt_tokens"] for one in usages)  # for each of two choices
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in usages]
    assert sum(cached) <= grew("vllm:prefix_cache_hits_total") < queried
    assert grew("vllm:e2e_request_latency_seconds_sum") > grew("vllm:time_to_first_token_seconds_sum") > 0
    steps = grew("convoy_step_seconds_count")
    assert steps > 0
    assert (
        peer_after("convoy_stage_step_seconds_count") - peer_before("convoy_stage_step_seconds_count")
        == steps
    )
    assert grew("convoy_hops_total", member="beta", direction="sent") >= steps
    assert grew("convoy_link_sealed_bytes_total", member="beta", direction="sent") > 0
    assert after("vllm:num_requests_running") == after("vllm:kv_cache_usage_perc") == 0


def test_what_one_end_of_a_link_sent_the_other_received(served: Served) -> None:
    served.ask("a", 2)

    def agree() -> bool:
        head, beta = served.head(), served.beta()
        return all(
            head("convoy_hops_total", member="beta", direction=here)
            == beta("convoy_hops_total", member="alpha", direction=there)
            > 0
            for here, there in (("sent", "received"), ("received", "sent"))
        )

    wait_until(agree)  # an empty step may pass between the two scrapes


def test_a_scrape_holds_nothing_of_what_was_asked_or_answered(served: Served) -> None:
    said = served.ask(SECRET, 12)["choices"][0]["text"]
    for text in (served.head().text, served.beta().text):
        for secret in (*SECRET.split()[:3], KEY, said.strip()):
            assert secret not in text
    assert httpx.get(f"{served.url}/metrics", timeout=60).status_code == 401


def test_a_peer_answers_to_its_own_names_and_path_alone(served: Served) -> None:
    found = served.beta()
    assert found("convoy_ready") == found("convoy_head_up") == 1
    assert found("convoy_stage_layers") == 2
    assert found("convoy_stage_weight_bytes") > 0
    url = served._peer_url
    assert httpx.get(url, headers={"host": "evil.example:80"}, timeout=60).status_code == 403
    assert httpx.get(url.replace("/metrics", "/"), timeout=60).status_code == 404
    assert httpx.post(url, timeout=60).status_code == 405
    port = int(url.split(":")[2].partition("/")[0])
    with (
        pytest.raises(ConfigError, match=f"cannot serve metrics on 127.0.0.1:{port}"),
        metrics_server([], ("127.0.0.1", port), None),
    ):
        pass


def test_after_a_loss_it_is_counted_and_no_sum_falls(served: Served) -> None:
    before = served.head()
    served.peer.stop()
    served.ask("a", 3)
    after = served.head()
    assert after("convoy_member_up", member="beta") == after("convoy_member_in_plan", member="beta") == 0
    assert after("convoy_links_lost_total", member="beta") == 1
    assert after("convoy_recoveries_total") == 1
    assert after("convoy_plan_generation") > before("convoy_plan_generation")
    for (name, labels), value in before.samples.items():
        if name.endswith(("_total", "_count", "_bucket")):
            assert after.samples[name, labels] >= value, name
