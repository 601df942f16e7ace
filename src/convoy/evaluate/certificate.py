"""What a check of a model's cuts found, and what it had to find: numbers beside their limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from convoy.model.backends.host.checks.selfcheck import EXACT, PLAIN, W4A16, W8A8
from convoy.model.device import CUDA_INT4, CUDA_INT8, CUDA_KERNEL

WAYS = ("one piece", "chunks", "decode", "batch")


@dataclass(frozen=True)
class Limits:
    """How far logits may lie from those of the unsplit stage, and from the library's whole model.

    Both are for logits up to 10 and grow in proportion beyond: float32 rounds in proportion. The median
    distance from the library, over positions, does not grow.
    """

    unsplit: float
    library: float
    median: float

    @staticmethod
    def grown(limit: float, greatest_logit: float) -> float:
        """``limit`` for logits that reach ``greatest_logit``."""
        return limit * max(1.0, greatest_logit / 10)


LIMITS = {
    EXACT: Limits(0.0, 2e-5, 2e-5),
    PLAIN: Limits(2e-5, 2e-5, 2e-5),
    # where a rounded row goes to another expert, one position may be far off
    W8A8: Limits(0.0, 5.0, 1.0),
    W4A16: Limits(0.0, 20.0, 5.0),
    # of bfloat16, whose step at 4 is 0.03
    CUDA_KERNEL: Limits(0.3, 0.3, 0.15),
    CUDA_INT8: Limits(0.3, 2.0, 0.5),
    CUDA_INT4: Limits(0.3, 20.0, 5.0),
}
# of bfloat16 and layers with experts: where two are nearly as good, it may choose another than float32 does,
# and one position is far from the library's. Seen: 0.06 from the unsplit stage, a median of 0.11
_CUDA_EXPERTS = Limits(0.5, 5.0, 0.3)


# of sums that ranks share, in float32: added in another order than in one process
_RANKS_LIBRARY = 4e-5


def limits_of(kernel: str, *, has_experts: bool, ranks: int = 1) -> Limits:
    """What a model has to keep to under ``kernel``; ``ranks``: of each stage, the unsplit one too."""
    if ranks > 1 and kernel in {EXACT, PLAIN}:
        return replace(LIMITS[kernel], library=_RANKS_LIBRARY)
    return _CUDA_EXPERTS if has_experts and kernel == CUDA_KERNEL else LIMITS[kernel]


@dataclass(frozen=True)
class Distance:
    """From the library's logits, over every position of every prompt."""

    greatest: float
    median: float  # of each position's greatest
    greatest_logit: float  # of the library's
    num_near_ties: int  # tokens that differ where the library's best two are too close to tell apart


@dataclass
class LayoutResult:
    """One layout. ``from_unsplit`` has the greatest difference of each of `WAYS`; infinite for a NaN."""

    spans: str
    num_stages: int
    from_unsplit: dict[str, float] = field(default_factory=dict)
    library: Distance | None = None
    from_float64: dict[int, float] = field(default_factory=dict)  # by prompt, of `Certificate.doubted`
    layers_once: int = 0  # layers that ran exactly once in every step
    tokens_equal: bool = False  # but for near ties, which a kernel with bits of its own has
    near_ties: int = 0
    failures: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass
class Certificate:
    """All of a model's results. It is worth what its prompts and cuts are: both are in it."""

    model: str
    digest: str
    kernel: str
    library: str  # "transformers 5.23.0"
    limits: Limits
    num_layers: int
    prompt_tokens: tuple[int, ...]
    decoded_tokens: int  # for each prompt
    chunks: tuple[int, ...]
    forbidden_cuts: dict[int, str]
    unreached_windows: tuple[int, ...]  # attention windows that no prompt here is longer than
    ranks: int = 1  # of each stage
    # prompts where the library's float32 was no judge: how far it is from its own float64
    doubted: dict[int, float] = field(default_factory=dict)
    results: list[LayoutResult] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def num_failed(self) -> int:
        return sum(not result.passed for result in self.results)
