"""What an engine is told, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.engine.stats import HistogramCounts, RequestSums


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``probe_s``: an idle engine sends an empty step round the ring this often; ``ready_s``: how old the
    last may be. ``share_across_keys``: requests share the K/V of a common prefix whatever their salt, which
    lets one client see by its times what another has asked.
    """

    max_context: int
    probe_s: float = 5.0
    ready_s: float = 15.0
    share_across_keys: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for people and metrics."""

    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    session_tokens: int  # that sessions asked to be run, those that were run again included
    preempted: int
    cached_tokens: int  # positions that were not run, because their K/V was there
    drafted_tokens: int  # guesses that were run
    accepted_tokens: int  # those of them that were right, and so generated
    ring_s: float | None  # how long the last empty step took to pass every stage
    recoveries: int  # how often other stages took over after a loss
    kv_usage: float  # of the fullest cache group's blocks, 1 for all
    queried_tokens: int  # asked of the prefix cache as sequences were first admitted, and those that it had
    hit_tokens: int
    requests: RequestSums
    step_s: HistogramCounts  # of steps with rows, from being sent to being back
    near_ties: int = 0  # tokens after one where another was as likely; see `engine.requests.near_tie`
