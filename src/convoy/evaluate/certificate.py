"""Hold the results of checking a model's cuts, and the limits that they must keep."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from convoy.model.backends.host.checks.selfcheck import EXACT, PLAIN, W4A16, W8A8
from convoy.model.device import CUDA_INT4, CUDA_INT8, CUDA_KERNEL

WAYS = ("one piece", "chunks", "decode", "batch")


@dataclass(frozen=True)
class Limits:
    """Bound the distance of logits from the unsplit stage's, and from the library's whole model.

    Both limits are for logits up to 10 and grow in proportion beyond, because float32 rounds in proportion.
    The median distance from the library, over positions, does not grow.
    """

    unsplit: float
    library: float
    median: float

    @staticmethod
    def grown(limit: float, greatest_logit: float) -> float:
        """Return ``limit`` for logits that reach ``greatest_logit``."""
        return limit * max(1.0, greatest_logit / 10)


LIMITS = {
    EXACT: Limits(0.0, 2e-5, 2e-5),
    PLAIN: Limits(2e-5, 2e-5, 2e-5),
    # If a rounded row goes to another expert, one position may be far off.
    W8A8: Limits(0.0, 5.0, 1.0),
    W4A16: Limits(0.0, 20.0, 5.0),
    # Kernels in bfloat16. The step of bfloat16 at 4 is 0.03.
    CUDA_KERNEL: Limits(0.3, 0.3, 0.15),
    CUDA_INT8: Limits(0.3, 2.0, 0.5),
    CUDA_INT4: Limits(0.3, 20.0, 5.0),
}
# Limits of bfloat16 with experts. If two experts score nearly the same, bfloat16 may choose another one than
# float32 does, and one position is then far from the library's. Seen: 0.06 from the unsplit stage, and
# a median of 0.11.
_CUDA_EXPERTS = Limits(0.5, 5.0, 0.3)


# Ranks add their float32 sums in another order than one process does, so the library may be further away.
_RANKS_LIBRARY = 4e-5


def limits_of(kernel: str, *, has_experts: bool, ranks: int = 1) -> Limits:
    """Return the limits for a model under ``kernel``.

    ``ranks`` counts those of each stage, the unsplit one too.
    """
    if ranks > 1 and kernel in {EXACT, PLAIN}:
        return replace(LIMITS[kernel], library=_RANKS_LIBRARY)
    return _CUDA_EXPERTS if has_experts and kernel == CUDA_KERNEL else LIMITS[kernel]


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
    limits: Limits
    num_layers: int
    prompt_tokens: tuple[int, ...]
    # For each prompt.
    decoded_tokens: int
    chunks: tuple[int, ...]
    forbidden_cuts: dict[int, str]
    # Attention windows that are at least as long as every prompt here.
    unreached_windows: tuple[int, ...]
    # Of each stage.
    ranks: int = 1
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
