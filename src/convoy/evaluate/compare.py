"""Compare logits and tokens with those of the unsplit stage and of the library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from convoy.config.kernels import ErrorBounds
from convoy.evaluate.certificate import WAYS, Distance
from convoy.evaluate.runs import Prompts, Run

# The most distance from float64, in multiples of the library's own float32. Both round, each in its own
# order.
_AS_FAR = 2


class Expected:
    """Hold each prompt's sampled tokens, and the logits of every position, from the unsplit stage and the
    library.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        self.tokens: list[tuple[int, ...]] = [() for _ in prompts]
        self.unsplit: list[torch.Tensor] = []
        self.library: list[torch.Tensor] = []
        # The library's logits in float64, by index of a prompt in doubt.
        self.float64: dict[int, torch.Tensor] = {}

    def add(self, run: Run) -> None:
        """Add a run of the unsplit stage by itself. Runs come in the order of positions."""
        self._parts[run.prompt].append(run.logits)
        self.tokens[run.prompt] = run.tokens
        if len(run.tokens):
            self.unsplit.append(torch.cat(self._parts[run.prompt]))
            self._parts[run.prompt].clear()

    def add_library(self, logits: Sequence[torch.Tensor]) -> None:
        """Set the library's logits of `texts`."""
        self.library = list(logits)

    def doubtful(self, limits: ErrorBounds) -> list[int]:
        """Return the prompts on which the unsplit stage is further from the library than half of the limit.

        On these the library's float32 may be wrong instead of ours.
        """
        found = []
        for index, (ours, library) in enumerate(zip(self.unsplit, self.library, strict=True)):
            allowed = limits.grown(limits.library, _greatest(library.abs()))
            if not _greatest(_distances(ours, library)) <= allowed / 2:
                found.append(index)
        return found

    def own_errors(self) -> dict[int, float]:
        """Return the distance of the library's float32 from its float64, by prompt in doubt."""
        return {
            index: _greatest(_distances(self.library[index], logits))
            for index, logits in self.float64.items()
        }

    @property
    def bits(self) -> str:
        """Return a hex SHA-256 of the unsplit stage's tokens and logits. Equal runs have the same bits."""
        digest = hashlib.sha256()
        for text, logits in zip(self.texts, self.unsplit, strict=True):
            digest.update(np.array([len(text), *text], "<i8").tobytes())
            digest.update(logits.numpy(force=True).astype("<f4", copy=False).tobytes())
        return digest.hexdigest()

    @property
    def texts(self) -> list[list[int]]:
        """Return each prompt with the tokens sampled after it but the last, which no step has run."""
        return [[*prompt, *sampled[:-1]] for prompt, sampled in zip(self._prompts, self.tokens, strict=True)]

    def num_near_ties(self, limits: ErrorBounds) -> tuple[int, int]:
        """Return how many sampled tokens the library would not sample: (near ties, others)."""
        near = wrong = 0
        for prompt, sampled, logits in zip(self._prompts, self.tokens, self.library, strict=True):
            for place, token in enumerate(sampled, start=len(prompt) - 1):
                row = logits[place]
                if int(row.argmax()) == token:
                    continue
                best = float(row.max())
                # Each of the two logits may be off by the limit.
                close = best - float(row[token]) <= 2 * limits.grown(limits.median, float(row.abs().max()))
                near, wrong = near + close, wrong + (not close)
        return near, wrong

    def others_than_unsplit(self, run: Run, limits: ErrorBounds) -> tuple[int, int]:
        """Return how many tokens of ``run`` the unsplit stage did not sample: (near ties, others)."""
        near = wrong = 0
        expected, prompt = self.tokens[run.prompt], self._prompts[run.prompt]
        for place, (token, other) in enumerate(zip(run.tokens, expected, strict=False), len(prompt) - 1):
            if token != other:
                row = self.unsplit[run.prompt][place]
                margin = float(row[other] - row[token])
                close = margin <= 2 * limits.grown(limits.unsplit, float(row.abs().max()))
                near, wrong = near + close, wrong + (not close)
        return near, wrong + (len(run.tokens) not in {0, len(expected)})


class Comparison:
    """Compare the runs of one layout with the expected logits and tokens."""

    def __init__(self, expected: Expected, limits: ErrorBounds) -> None:
        self.from_unsplit = dict.fromkeys(WAYS, 0.0)
        # Apart from near ties.
        self.tokens_equal = True
        # Tokens that the unsplit stage prefers by less than the limits.
        self.num_near_ties = 0
        self._expected = expected
        self._limits = limits
        # By prompt: a distance [n] for each of its runs.
        self._library: list[list[torch.Tensor]] = [[] for _ in expected.tokens]
        # By prompt in doubt.
        self.from_float64 = dict.fromkeys(expected.float64, 0.0)
        self._own_errors = expected.own_errors()

    def add(self, run: Run) -> None:
        """Add a run. If it samples tokens, they must be the expected ones."""
        places = slice(run.start, run.start + len(run.logits))
        unsplit = _distances(run.logits, self._expected.unsplit[run.prompt][places])
        self.from_unsplit[run.way] = max(self.from_unsplit[run.way], _greatest(unsplit))
        library = self._expected.library[run.prompt][places]
        self._library[run.prompt].append(_distances(run.logits, library))
        if run.prompt in self.from_float64:
            off = _greatest(_distances(run.logits, self._expected.float64[run.prompt][places]))
            self.from_float64[run.prompt] = max(self.from_float64[run.prompt], off)
        near, wrong = self._expected.others_than_unsplit(run, self._limits)
        self.num_near_ties += near
        self.tokens_equal = self.tokens_equal and not wrong

    def library_distance(self) -> Distance | None:
        """Return the distance from the library over all runs, or None if nothing ran."""
        every = [distances for parts in self._library for distances in parts]
        if not every:
            return None
        joined = torch.cat(every)
        return Distance(
            greatest=_greatest(joined),
            median=float(joined.median()),
            greatest_logit=max(_greatest(logits.abs()) for logits in self._expected.library),
            num_near_ties=self._expected.num_near_ties(self._limits)[0],
        )

    def failures(self, library: str) -> list[str]:
        """Return one line for each limit that does not hold. No line names a token."""
        found = []
        reach = max(_greatest(logits.abs()) for logits in self._expected.library)
        allowed = self._limits.grown(self._limits.unsplit, reach)
        for way, distance in self.from_unsplit.items():
            if not distance <= allowed:
                found.append(
                    f"{way}: logits differ from the unsplit stage's by {distance:.2g}, "
                    f"expected {f'at most {allowed:.2g}' if allowed else 'no difference'}"
                )
        if not self.tokens_equal:
            found.append("tokens differ from the unsplit stage's")
        return found + self._library_failures(library)

    def _library_failures(self, library: str) -> list[str]:
        limit, found = self._limits.library, []
        for index, parts in enumerate(self._library):
            reach = _greatest(self._expected.library[index].abs())
            allowed, distance = self._limits.grown(limit, reach), max(map(_greatest, parts), default=0.0)
            if not distance <= allowed and not self._is_right_in_float64(index, allowed):
                found.append(
                    f"prompt {index}: logits differ from those of {library} by {distance:.2g}, "
                    f"expected at most {allowed:.2g} where they reach {reach:.3g}{self._off(index)}"
                )
        distance_of_all = self.library_distance()
        if distance_of_all is not None and not distance_of_all.median <= self._limits.median:
            found.append(
                f"the median distance from {library} is {distance_of_all.median:.2g}, "
                f"expected at most {self._limits.median:.2g}"
            )
        wrong = self._expected.num_near_ties(self._limits)[1]
        if wrong:
            found.append(f"{wrong} tokens are not those of {library}, and no near ties")
        return found

    def _is_right_in_float64(self, index: int, allowed: float) -> bool:
        """Return whether the runs are as near to the library's float64 as float32 gets.

        The limit decides, or twice the distance of the library's own float32.
        """
        if index not in self.from_float64:
            return False
        return self.from_float64[index] <= max(allowed, _AS_FAR * self._own_errors[index])

    def _off(self, index: int) -> str:
        if index not in self.from_float64:
            return ""
        ours, own = self.from_float64[index], self._own_errors[index]
        return f"; from its float64 by {ours:.2g}, and its own float32 is {own:.2g} from that"


def _distances(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return [n]: each position's greatest difference; infinite if either value is not finite."""
    distances = (found - expected).abs().amax(-1)
    return torch.where(torch.isfinite(distances), distances, torch.inf)


def _greatest(distances: torch.Tensor) -> float:
    return float(distances.max()) if distances.numel() else 0.0
