"""The grants and wishes of a member's operator, resolved once by the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from convoy.config.kernels import AUTO, CUDA_KERNELS, KV_FORMS, on_device
from convoy.config.table import (
    CHUNK_S,
    CLUSTER,
    DEVICE_BATCH,
    DEVICE_CHUNK,
    ENGINE,
    HOST_BATCH,
    HOST_CHUNK,
    MAX_DRAFT,
    MAX_IN_FLIGHT,
    MAX_RANKS,
    MAX_STEP_TOKENS,
    MODEL,
    PLAN,
    SERVE,
)
from convoy.engine.kv.limits import STEP_TIMEOUT_S
from convoy.engine.scheduler import GroupLimits, SchedulerLimits
from convoy.engine.speculation import GrammarDrafter, LookupDrafter
from convoy.errors import ConfigError
from convoy.plan.cost import TokenCost
from convoy.plan.memory.blocks import BlockDemand, batch_for_room
from convoy.plan.placement.parallel import ASKED, Asked
from convoy.plan.spec.model import ModelSpec
from convoy.trust.evidence.policy import Policy
from convoy.wire.messages.control import MAX_BATCH
from convoy.wire.messages.fetch import PIECE_BYTES

_WHERE = "docs/configuration.md has every key of convoy.toml with its flag"

_UNITS = {
    "max_batch": "sequences",
    "prefill_window": "steps in flight",
    "micro_batches": "steps in flight",
}


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Hold the grants of this machine to the cluster.

    ``memory_bytes`` bounds weights and K/V together; 0 means the memory that is free now. ``policy`` is
    what it demands of others; ``tpm`` says how to reach this machine's TPM (as tpm2-tools' ``--tcti``),
    None for none.

    ``cache`` is a private folder. A peer keeps the received parts of models there, and every member the
    digests of its own files. None: a peer runs only models that it has files of, and all is hashed anew
    at each start. ``weights_from`` says where a peer without files gets its layers: "head", "hub", or
    "auto" for the hub that the plan names and then the head; a head with "head" names none. ``hub`` is
    that hub's address, None for the public one. ``signed``: the digest of the manifest that the operator
    signed; no other model is run. ``device``: the device that computes, see `model.device`.
    """

    memory_bytes: int = 0
    num_threads: int | None = None
    kernel: str = MODEL.kernel
    activation_dtype: str = MODEL.activation_dtype
    policy: Policy = field(default_factory=Policy)
    tpm: str | None = None
    cache: Path | None = None
    device: str = MODEL.device
    weights_from: str = MODEL.weights_from
    hub: str | None = None
    # The first wait before the hub is tried again; None leaves the hub client's own.
    hub_retry_s: float | None = None
    # How long a head waits until a peer says which tensors it has.
    held_answer_s: float = 12.0
    # How long a peer that sends a part of the weights to the head may be silent. Four of them may be so
    # before the member that waits for the head gives up.
    part_stall_s: float = 12.0
    # Of the weights, as this member asks others for them.
    piece_bytes: int = PIECE_BYTES
    # How long the ranks of a stage may take from the activation until all of them have computed one sum.
    ranks_join_s: float = 15.0
    signed: str | None = None


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Hold a peer's own options.

    It runs a bundled model by its name, and any other from ``model_path``. With a cache it also runs a
    model that the head serves: a head never names a path.
    """

    member: MemberOptions = field(default_factory=MemberOptions)
    model_path: Path | None = None
    successor_wait_s: float = 10.0
    exit_with_head: bool = False
    # No stage until another member is lost.
    standby: bool = CLUSTER.standby


@dataclass(frozen=True, slots=True)
class RebalanceOptions:
    """Limit how often a member that came interrupts running requests.

    Until ``busy_s`` after it came, a member is used only if no request runs. ``again_s`` lie between two
    interruptions because of one member. A member that comes and goes is used ``max_at_once`` times as soon
    as no request runs; later it must wait.
    """

    busy_s: float = 30.0
    again_s: float = 180.0
    max_at_once: int = 5


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Hold the head's demands on the cluster.

    ``wait_s`` is how long it waits for every member at the start. If those that came cannot hold the
    model it waits on for the others with ``keep_waiting``, and raises without. ``answer_s``: how long a
    member that came may take for its greeting, and to begin a plan.

    ``kv_dtype`` is the dtype of K/V on every stage; "auto" is that of each kernel.

    ``num_blocks``, of each cache group, 0 means as many as fit, up to a full batch of full contexts.
    ``prefill_chunk`` 0: as `for_kernels` says. ``micro_batches`` are steps in flight, 0: as many as
    stages; ``prefill_window`` chunks of one prompt in flight, 0: as many as micro-batches. With
    ``level_chunks`` a chunk gets shorter as attention grows.

    ``max_batch`` 1 runs one sequence at a time. None: as `for_kernels` says, and no more than K/V has room
    for. ``on_cuda`` and ``chunk_s`` (`SchedulerLimits`): `for_kernels` sets them. ``speculate`` is how many
    tokens are guessed at once, at most; 0: none. Guesses change no text if a row's bits are its own, in exact
    mode and with rounded linears. Under other kernels a row's bits depend on how many rows are beside it, and
    no token is guessed without ``guess_inexact``. With ``jump_forward``, tokens that a request's grammar
    forces are guessed in the same cases, also if ``speculate`` is 0.

    With ``share_across_keys`` requests share K/V of a common prefix under any API key.

    ``step_timeout_s``: how long a step may take as long as none was measured. ``recover_wait_s``: how
    long a lost member without a replacement may take to come back; with all that is loaded meanwhile,
    ``load_wait_s`` more.

    ``parallel`` says how members share the model (`placement.parallel`), ``ranks`` how many hold a stage
    together when they share its layers; None: as many as can be.
    """

    member: MemberOptions = field(default_factory=MemberOptions)
    spans: Mapping[str, str] | None = None
    wait_s: float = PLAN.wait_s
    keep_waiting: bool = False
    answer_s: float = 60.0
    load_wait_s: float = 600.0
    step_timeout_s: float = STEP_TIMEOUT_S
    recover_wait_s: float = PLAN.recover_wait_s
    block_size: int = ENGINE.block_size
    kv_dtype: str = ENGINE.kv_dtype
    num_blocks: int = ENGINE.num_blocks
    max_context: int = ENGINE.max_model_len
    max_batch: int | None = ENGINE.max_batch
    on_cuda: bool = False
    chunk_s: float | None = None
    max_step_tokens: int = ENGINE.max_step_tokens
    prefill_chunk: int = ENGINE.prefill_chunk
    prefill_window: int = ENGINE.prefill_window
    micro_batches: int = ENGINE.micro_batches
    level_chunks: bool = ENGINE.level_chunks
    speculate: int = 0
    guess_inexact: bool = False
    jump_forward: bool = True
    share_across_keys: bool = ENGINE.share_across_keys
    max_waiting: int = SERVE.max_waiting
    parallel: Asked = PLAN.parallel
    ranks: int | None = PLAN.ranks
    rebalance: RebalanceOptions = RebalanceOptions()

    def check_context(self, spec: ModelSpec) -> None:
        """Raise `ConfigError` for a longer context than the model has."""
        if self.max_context > spec.max_context:
            raise ConfigError(
                f"max_model_len is {self.max_context} tokens, and the model's context has {spec.max_context}",
                hint=f"max_model_len under [engine], or --max-model-len: {spec.max_context} or less",
            )

    def check(self) -> None:
        """Raise `ConfigError` for more steps in flight than a stage's queue takes, and for sizes below 1."""
        for name, least, most in (
            ("max_batch", 1, MAX_BATCH),
            ("max_step_tokens", 1, MAX_STEP_TOKENS),
            ("prefill_chunk", 0, MAX_STEP_TOKENS),
            ("prefill_window", 0, MAX_IN_FLIGHT),
            ("micro_batches", 0, MAX_IN_FLIGHT),
            ("speculate", 0, MAX_DRAFT),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(
                    f"{name} is {value}, expected {least} to {most} {_UNITS.get(name, 'tokens')}", hint=_WHERE
                )
        if self.parallel not in ASKED:
            raise ConfigError(f"parallel is {self.parallel}, expected {', '.join(ASKED)}", hint=_WHERE)
        if self.kv_dtype not in {AUTO, *KV_FORMS}:
            expected = ", ".join((AUTO, *KV_FORMS))
            raise ConfigError(f"kv_dtype is {self.kv_dtype}, expected {expected}", hint=_WHERE)
        if self.ranks is not None and not 2 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"ranks is {self.ranks}, expected 2 to {MAX_RANKS} of each stage", hint=_WHERE)

    def for_kernels(self, kernels: Iterable[str]) -> HeadOptions:
        """Return these options with the chunk size and the batch that suit stages with these kernels.

        The slowest stage sets them, so one host is enough for short chunks and a small batch. Explicit sizes
        stay.
        """
        found = tuple(kernels)
        are_devices = all(map(on_device, found))
        chunk = self.prefill_chunk or (DEVICE_CHUNK if are_devices else HOST_CHUNK)
        chunk_s = self.chunk_s if self.prefill_chunk or not are_devices else CHUNK_S
        on_cuda = all(kernel in CUDA_KERNELS for kernel in found)
        return replace(self, prefill_chunk=chunk, chunk_s=chunk_s, on_cuda=on_cuda)

    @property
    def at_once(self) -> int:
        """Return the most sequences that run at once, if K/V has room for them."""
        return self.max_batch or (DEVICE_BATCH if self.on_cuda else HOST_BATCH)

    @property
    def chunk_tokens(self) -> int:
        """Return the most tokens of a prompt's chunk."""
        return self.prefill_chunk or HOST_CHUNK

    @property
    def step_tokens(self) -> int:
        """Return the most tokens of a step."""
        return max(self.max_step_tokens, self.chunk_tokens)

    def num_micro_batches(self, num_stages: int) -> int:
        """Return the steps in flight while tokens are generated. One stage runs a step at a time anyway."""
        return 1 if num_stages == 1 else self.micro_batches or num_stages

    def depth(self, num_stages: int) -> int:
        """Return the most steps in flight."""
        return max(self.num_micro_batches(num_stages), 0 if num_stages == 1 else self.prefill_window)

    @property
    def max_row_tokens(self) -> int:
        """Return the most tokens of a row: a chunk of a prompt, or a token and its guesses."""
        return max(self.chunk_tokens, MAX_DRAFT + 1)

    def demand(self, *, block_size: int, max_context: int) -> BlockDemand:
        """Return how many K/V blocks are wanted."""
        return BlockDemand(
            block_size=block_size,
            max_context=max_context,
            max_batch=self.at_once,
            max_row_tokens=self.max_row_tokens,
            num_blocks=self.num_blocks,
        )

    def limits(
        self, spec: ModelSpec, *, num_stages: int, num_blocks: Sequence[int], block_size: int
    ) -> SchedulerLimits:
        """Return the scheduler's limits, once a plan is known."""
        groups = tuple(
            GroupLimits(count, group.ring_blocks(block_size, self.max_row_tokens), group.stride, group.window)
            for group, count in zip(spec.cache_groups, num_blocks, strict=True)
        )
        tokens = [one.num_blocks * block_size * one.stride for one in groups if one.ring is None]
        return SchedulerLimits(
            groups=groups,
            block_size=block_size,
            max_batch=self.max_batch or batch_for_room(self.at_once, min(tokens, default=None)),
            max_step_tokens=self.step_tokens,
            prefill_chunk=self.chunk_tokens,
            prefill_window=0 if num_stages == 1 else self.prefill_window,
            max_waiting=self.max_waiting,
            micro_batches=self.num_micro_batches(num_stages),
            cost=TokenCost.of(spec) if self.level_chunks else None,
            chunk_s=self.chunk_s,
        )

    def num_guesses(self, spec: ModelSpec, *, steady: bool) -> int:
        """Return the tokens guessed at once: 0 if a wrong guess cannot be undone or may change the text."""
        return self.speculate if self._may_guess(spec, steady=steady) else 0

    def _may_guess(self, spec: ModelSpec, *, steady: bool) -> bool:
        return spec.can_rewind and (steady or self.guess_inexact)

    def why_no_guesses(self, spec: ModelSpec, kernel: str) -> str:
        """Return the reason why `num_guesses` is 0 although guesses were asked for."""
        if not spec.can_rewind:
            return "this model's layers keep a state, from which a wrong guess could not be taken back"
        return f"with kernel {kernel} that may change a text"

    def drafter(self, spec: ModelSpec, *, steady: bool) -> GrammarDrafter | None:
        """Return the drafter, or None. ``steady``: the kernel gives a row the same bits beside any others."""
        num_guesses = self.num_guesses(spec, steady=steady)
        lookup = LookupDrafter(num_guesses) if num_guesses else None
        forces = self.jump_forward and self._may_guess(spec, steady=steady)
        return GrammarDrafter(lookup) if lookup or forces else None
