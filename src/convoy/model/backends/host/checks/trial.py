"""A stage's layers are tried on made-up rows when they are loaded, before anybody asks for a token.

A config.json may make layers that fit their weights and still cannot run: a router with more groups than
experts divide into, for one. That is seen here, and not in somebody's first request.
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
    """Of layers that ``run`` runs, in pools of ``make_pools``, which ``forget`` frees: both are a stage's.

    ``run`` takes hidden states [n, hidden_size], a step of n rows and token ids [n], and gives n hidden
    states or more; ``output`` makes logits of them, and is None where the stage has no output.
    """

    spec: ModelSpec
    hidden_size: int
    block_size: int
    make_pools: Callable[[int], None]
    forget: Callable[[], None]
    run: Callable[[torch.Tensor, StagedStep, torch.Tensor], torch.Tensor]
    output: Callable[[torch.Tensor], torch.Tensor] | None

    def once(self) -> None:
        """A single token, which takes what a decode takes. Raises ModelError where it does not run."""
        hidden = torch.ones(1, self.hidden_size)
        with torch.inference_mode():
            found = self._attempt(hidden, torch.zeros(1, dtype=torch.int64), [1])
        if self.output is not None:
            self._explained(self.output, found)

    def prove(self) -> None:
        """Many rows, whole and in pieces, which are to have the same bits.

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
