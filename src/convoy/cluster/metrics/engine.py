"""The metrics of an engine, under vLLM's names if the meaning is the same; the others have our names.

`docs/metrics.md` explains each. Names and types: `vllm/v1/metrics/loggers.py`. For the three that an
endpoint picker routes by: the model server protocol of the Gateway API Inference Extension.
"""

from __future__ import annotations

from collections.abc import Iterator

from convoy.cluster.metrics.families import Metric, counter, gauge, histogram
from convoy.engine.stats import EngineStats


def engine_families(model: str, block_size: int, stats: EngineStats) -> Iterator[Metric]:
    """Yield the metric families of an engine. ``model`` is its name for clients."""
    yield from _state(model, block_size, stats)
    yield from _tokens(model, stats)
    yield from _requests(model, stats)
    yield from _steps(model, stats)


def _state(model: str, block_size: int, stats: EngineStats) -> Iterator[Metric]:
    of = {"model_name": model}
    yield gauge("vllm:num_requests_running", "Answers that run in the batch.", [(of, stats.running)])
    yield gauge("vllm:num_requests_waiting", "Answers that wait to be admitted.", [(of, stats.waiting)])
    yield gauge(
        "vllm:kv_cache_usage_perc", "Part of the K/V blocks in use; 1 is all.", [(of, stats.kv_usage)]
    )
    cache = {"block_size": str(block_size), "num_gpu_blocks": str(stats.num_blocks), **of}
    yield gauge("vllm:cache_config_info", "Blocks of K/V, and tokens in each.", [(cache, 1)])


def _tokens(model: str, stats: EngineStats) -> Iterator[Metric]:
    of = {"model_name": model}
    for name, text, value in (
        ("vllm:prompt_tokens", "Tokens of prompts that were run.", stats.requests.prompt_tokens),
        ("vllm:generation_tokens", "Tokens that were generated.", stats.generated_tokens),
        ("vllm:prefix_cache_queries", "Tokens that were looked for in the cache.", stats.queried_tokens),
        ("vllm:prefix_cache_hits", "Those of them that were found.", stats.hit_tokens),
        ("vllm:num_preemptions", "Answers put back to wait, because blocks were lacking.", stats.preempted),
        ("vllm:spec_decode_num_draft_tokens", "Guesses that were run.", stats.drafted_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Those of them that were right.", stats.accepted_tokens),
        ("convoy_session_tokens", "Tokens that sessions asked to be run.", stats.session_tokens),
        ("convoy_near_ties", "Tokens after a loss that could have been others.", stats.near_ties),
        ("convoy_recoveries", "How often other stages took over after a loss.", stats.recoveries),
    ):
        yield counter(name, text, [(of, value)])


def _requests(model: str, stats: EngineStats) -> Iterator[Metric]:
    of, sums = {"model_name": model}, stats.requests
    finished = [({"finished_reason": why, **of}, count) for why, count in sums.finished.items()]
    yield counter("vllm:request_success", "Answers that ended, and how.", finished)
    for name, text, counts in (
        ("vllm:time_to_first_token_seconds", "From arrival to the first token.", sums.first_token),
        ("vllm:inter_token_latency_seconds", "From a step's tokens to the next's.", sums.between_tokens),
        ("vllm:request_queue_time_seconds", "From arrival to the first step.", sums.queued),
        ("vllm:e2e_request_latency_seconds", "From arrival to the end.", sums.whole),
    ):
        yield histogram(name, text, [(of, counts)])


def _steps(model: str, stats: EngineStats) -> Iterator[Metric]:
    of = {"model_name": model}
    yield histogram(
        "convoy_step_seconds", "Seconds of steps with rows, through all stages.", [(of, stats.step_s)]
    )
    if stats.ring_s is not None:
        yield gauge(
            "convoy_ring_seconds", "Seconds of the last empty step through all stages.", [(of, stats.ring_s)]
        )
