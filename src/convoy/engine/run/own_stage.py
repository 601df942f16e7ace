"""Turn a failure on the head's own side of a step into a lost stage, as for a failure of a peer's stage.

So the steps in flight run again, and a request that no stage can run ends alone (`without_loss`); otherwise
the engine would end all requests. An error that is neither a `ConvoyError` nor a lack of memory is a defect,
and does end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from convoy.errors import ConvoyError, LinkBroken, LinkClosed, StageLost

_PUBLIC = "the head could not run a step"


@contextmanager
def own_stage(step: int, on_failure: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Do the head's work for ``step``, and call ``on_failure`` if it fails. Errors of links pass unchanged.

    Raises `StageLost`.
    """
    try:
        yield
    except (StageLost, LinkBroken, LinkClosed):
        raise
    except ConvoyError as error:
        on_failure()
        text = f"the head could not run step {step}: {error.message}"
        raise StageLost(text, hint=error.hint, public=_PUBLIC) from error
    except (MemoryError, RuntimeError) as error:
        if not _wants_memory(error):
            raise
        on_failure()
        hint = "give it fewer layers, or less to do at once (max_batch, prefill_chunk)"
        text = f"the head could not run step {step}: there is no memory for it"
        raise StageLost(text, hint=hint, public=_PUBLIC) from error


def _wants_memory(error: Exception) -> bool:
    # On a host, torch reports a lack of memory by a plain RuntimeError.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
