"""The process's limit of open files, which bounds the connections it can hold at once."""

from __future__ import annotations

import contextlib

_ENOUGH = 65_536
_UNKNOWN = 1024


def raise_descriptor_limit(enough: int = _ENOUGH) -> int:
    """Raise the soft limit of open files towards the hard one, to ``enough`` at most, and return the new
    limit.

    A shell often grants 1,024, which a few idle clients use up. The limit is never lowered.
    """
    try:
        import resource
    # Windows has no such module, and no such limit.
    except ImportError:
        return enough
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS refuses more than kern.maxfilesperproc, whatever the hard limit says.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return how many files and sockets this process may have open."""
    try:
        import resource
    except ImportError:
        return _UNKNOWN
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
