"""What goes wrong on the head's own side of a step is a stage that is lost, as where a peer's stage fails.

So what was in flight is run again, and a request that no stage can run ends alone (`relapse`), where the
engine would end for everybody. What is no `ConvoyError` is a defect, and does end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from convoy.errors import ConvoyError, LinkBroken, LinkClosed, StageLost


@contextmanager
def own_stage(step: int, blame: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The head's work for ``step``; ``blame`` is told where that failed. Links that end pass unchanged.

    Raises `StageLost`.
    """
    try:
        yield
    except (StageLost, LinkBroken, LinkClosed):
        raise
    except ConvoyError as error:
        blame()
        public = "the head could not run a step"
        text = f"the head could not run step {step}: {error.message}"
        raise StageLost(text, hint=error.hint, public=public) from error
