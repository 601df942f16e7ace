"""Whether a member that gets or checks weights gets on: only then is it waited for any longer."""

from __future__ import annotations

from convoy.wire.messages.control import Progress

_MAX_PASSES = 32  # of one member: files, digests, a hub and the head, and each once more


class ProgressWatch:
    """What members said of how far they are. Not thread-safe."""

    def __init__(self) -> None:
        self._reached: dict[str, dict[tuple[str, int], int]] = {}

    def is_further(self, member: str, progress: Progress) -> bool:
        """Whether it says more than ever in this pass: one has a stage and a total of its own.

        The number of passes is bounded, so that nobody is waited for without end by its own word.
        """
        passes = self._reached.setdefault(member, {})
        key = progress.stage, progress.total_bytes
        if key not in passes and len(passes) >= _MAX_PASSES:
            return False
        if progress.loaded_bytes <= passes.get(key, -1):
            return False
        passes[key] = progress.loaded_bytes
        return True
