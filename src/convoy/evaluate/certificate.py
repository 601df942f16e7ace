"""Hold the results of checking a model's cuts, and the limits that they must keep."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from convoy.config.kernels import (
    AUTO,
    EXPERT_KV_ERROR,
    EXPERT_KV_MEDIAN,
    KERNELS,
    ErrorBounds,
    kv_form,
)
from convoy.model.quantize.record import QuantizeRecord

WAYS = ("one piece", "chunks", "decode", "batch")


def limits_of(kernel: str, *, has_experts: bool, ranks: int = 1, kv_dtype: str = AUTO) -> ErrorBounds:
    """Return the limits for a model under ``kernel``.

    ``ranks`` counts those of each stage, the unsplit one too. K/V that are rounded move a model away from
    the library's, and no cut away from the unsplit stage.
    """
    row, form = KERNELS[kernel], kv_form(kernel, kv_dtype)
    limits = row.expert_bounds if has_experts and row.expert_bounds is not None else row.bounds
    if ranks > 1 and row.ranks_library is not None:
        limits = replace(limits, library=max(limits.library, row.ranks_library))
    if form.name in {"f32", kv_form(kernel).name}:
        return limits
    error, median = (EXPERT_KV_ERROR, EXPERT_KV_MEDIAN) if has_experts else (form.error, form.median)
    return replace(limits, library=limits.library + error, median=limits.median + median)


@dataclass(frozen=True)
class Distance:
    """Hold the distance from the library's logits over every position of every prompt."""

    greatest: float
    # The median over positions of each position's greatest difference.
    median: float
    # The greatest of the library's logits.
    greatest_logit: float
    # The tokens that differ although the library's best two are too close to tell apart.
    num_near_ties: int


@dataclass
class LayoutResult:
    """Hold the result of one layout.

    ``from_unsplit`` has the greatest difference for each of `WAYS`, and infinity for a NaN.
    """

    spans: str
    num_stages: int
    from_unsplit: dict[str, float] = field(default_factory=dict)
    library: Distance | None = None
    # By prompt, for those in `Certificate.doubted`.
    from_float64: dict[int, float] = field(default_factory=dict)
    # The layers that ran exactly once in every step.
    layers_once: int = 0
    # Apart from near ties, which occur under a kernel that does not fix the bits.
    tokens_equal: bool = False
    near_ties: int = 0
    failures: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass
class Certificate:
    """Hold all of a model's results. Its prompts and cuts decide its worth, so it names both."""

    model: str
    digest: str
    kernel: str
    # For example "transformers 5.23.0".
    library: str
    limits: ErrorBounds
    num_layers: int
    prompt_tokens: tuple[int, ...]
    # For each prompt.
    decoded_tokens: int
    chunks: tuple[int, ...]
    forbidden_cuts: dict[int, str]
    # Attention windows that are at least as long as every prompt here.
    unreached_windows: tuple[int, ...]
    # A hex SHA-256 of the whole model's tokens and logits, for these prompts and this number of decodes.
    bits: str
    # The instruction set of compiled code, and where it was made; empty where torch computes all.
    compiled_for: str
    # Of each stage.
    ranks: int = 1
    kv_dtype: str = AUTO
    # Of a model that `convoy quantize` wrote, as its folder says, or of a kernel that rounds at load.
    rounded: QuantizeRecord | None = None
    # By prompt for which the library's float32 was no judge: its distance from the library's own float64.
    doubted: dict[int, float] = field(default_factory=dict)
    results: list[LayoutResult] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def num_failed(self) -> int:
        return sum(not result.passed for result in self.results)
