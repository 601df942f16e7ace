"""The engine's options and the snapshot of its state."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.config.table import ENGINE
from convoy.engine.stats import HistogramCounts, RequestSums


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Hold the options of an engine.

    An idle engine sends an empty step round the ring every ``probe_s`` seconds. It is ready while the last
    step is at most ``ready_s`` seconds old. With ``share_across_keys``, requests share the K/V of a common
    prefix whatever their salt: response times then tell one client which prompts another has sent.
    """

    max_context: int
    probe_s: float = 5.0
    ready_s: float = 15.0
    share_across_keys: bool = ENGINE.share_across_keys


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Hold a snapshot for people and metrics."""

    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    # Tokens that sessions asked to run, replayed ones included.
    session_tokens: int
    preempted: int
    # Positions that did not run, because their K/V was there.
    cached_tokens: int
    # Guesses that ran.
    drafted_tokens: int
    # Guesses that were right, and so became generated tokens.
    accepted_tokens: int
    # How long the last empty step took to pass every stage, in seconds.
    ring_s: float | None
    # How often other stages took over after a loss.
    recoveries: int
    # The owned share of the fullest cache group's blocks, from 0 to 1.
    kv_usage: float
    # Tokens looked up in the prefix cache at first admissions, and those that it had.
    queried_tokens: int
    hit_tokens: int
    requests: RequestSums
    # Of steps with rows, from submission to collection.
    step_s: HistogramCounts
    # Tokens after a replay where another token was as likely; see `engine.requests.near_tie`.
    near_ties: int = 0
