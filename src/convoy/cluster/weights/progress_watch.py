"""Tell whether a member that fetches or checks weights makes progress: only then is it waited for longer.

It is apart because the head's bring-up and its prefetch both use it.
"""

from __future__ import annotations

from convoy.wire.messages.control import Progress

# Passes of one member: files, digests, a hub and the head, and each once more.
_MAX_PASSES = 32


class ProgressWatch:
    """Hold the progress that members reported. Not thread-safe."""

    def __init__(self) -> None:
        self._reached: dict[str, dict[tuple[str, int], int]] = {}

    def is_further(self, member: str, progress: Progress) -> bool:
        """Return whether a report exceeds all earlier ones of its pass.

        A pass has a phase and a total of its own. The number of passes is bounded, so that no member can
        be waited for without end by its own word.
        """
        passes = self._reached.setdefault(member, {})
        key = progress.stage, progress.total_bytes
        if key not in passes and len(passes) >= _MAX_PASSES:
            return False
        if progress.loaded_bytes <= passes.get(key, -1):
            return False
        passes[key] = progress.loaded_bytes
        return True
