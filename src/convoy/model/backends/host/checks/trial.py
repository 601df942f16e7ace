"""Try a stage's layers on made-up rows when they are loaded, before the first request.

A config.json may describe layers that fit their weights and still cannot run, for example a router with
more groups than its experts divide into. The trial finds this at load time, and not in a user's first
request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from convoy.errors import ModelError
from convoy.model.backends.host.checks.selfcheck import CHECK_ROWS, check_rows
from convoy.model.kv.pools import BlockTable, StagedStep
from convoy.model.library import FAILURES, FOREIGN, reason
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import Row


@dataclass(frozen=True)
class Trial:
    """Try layers with ``run``, in pools that ``make_pools`` makes and ``forget`` frees.

    All three are methods of a stage. ``run`` takes hidden states [n, hidden_size], a step of n rows and
    token ids [n], and returns n hidden states or more. ``output`` makes logits of them, and is None where
    the stage has no output.
    """

    spec: ModelSpec
    hidden_size: int
    block_size: int
    make_pools: Callable[[int], None]
    forget: Callable[[], None]
    run: Callable[[torch.Tensor, StagedStep, torch.Tensor], torch.Tensor]
    output: Callable[[torch.Tensor], torch.Tensor] | None

    def once(self) -> None:
        """Run a single token, which takes the path of a decode. Raises ModelError where it does not run."""
        hidden = torch.ones(1, self.hidden_size)
        with torch.inference_mode():
            found = self._attempt(hidden, torch.zeros(1, dtype=torch.int64), [1])
        if self.output is not None:
            self._explained(self.output, found)

    def prove(self) -> None:
        """Run many rows, whole and in pieces, and check that their bits agree.

        Raises SelfCheckError where they differ, ModelError where they do not run.
        """
        check_rows(self._attempt, self.hidden_size, self.spec.vocab_size)

    def _attempt(self, hidden: torch.Tensor, tokens: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
        num_blocks = -(-min(len(hidden), CHECK_ROWS) // self.block_size)
        table = BlockTable([list(range(num_blocks)) for _ in self.spec.cache_groups])
        self.make_pools(num_blocks)
        found, start = [], 0
        try:
            for count in chunks:
                part = slice(start, start + count)
                staged = StagedStep({}, [(Row(0, start, count, 0), table)], Counter(), set())
                found.append(self._explained(self.run, hidden[part], staged, tokens[part])[:count])
                start += count
        finally:
            self.forget()
        return torch.cat(found)

    def _explained(self, run: Callable[..., torch.Tensor], *given: object) -> torch.Tensor:
        try:
            return run(*given)
        except FAILURES as error:
            raise ModelError(
                f"{self.spec.name}: layers of type {self.spec.family} do not run as config.json has them: "
                f"{reason(error)}",
                hint=FOREIGN,
            ) from error
