"""What a member's operator granted and asked: resolved once, by the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from convoy.trust.policy import Policy


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """What this machine gives to the cluster.

    ``memory_bytes`` bounds weights and K/V together; 0 means what is free now. ``policy`` is what it demands
    of others; ``tpm`` says how to reach this machine's TPM (as tpm2-tools' ``--tcti``), None for none.
    """

    memory_bytes: int = 0
    num_threads: int | None = None
    kernel: str = "auto"
    activation_dtype: str = "float32"
    policy: Policy = field(default_factory=Policy)
    tpm: str | None = None


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """A peer's own part.

    It runs a bundled model by its name, any other only from ``model_path``: a head never names a path.
    """

    member: MemberOptions = field(default_factory=MemberOptions)
    model_path: Path | None = None
    successor_wait_s: float = 10.0
    exit_with_head: bool = False


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What the head asks of the cluster.

    ``num_blocks`` 0 means as many as fit, up to a full batch of full contexts.
    """

    member: MemberOptions = field(default_factory=MemberOptions)
    spans: Mapping[str, str] | None = None
    wait_s: float = 60.0
    load_wait_s: float = 600.0
    step_timeout_s: float = 60.0
    block_size: int = 16
    num_blocks: int = 0
    max_context: int = 0
    max_batch: int = 32
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    max_waiting: int = 256
