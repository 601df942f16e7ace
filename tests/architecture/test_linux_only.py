"""A call that only Linux has stands beside a question whether it is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "convoy"
# What only Linux has, and what a module with it must say too.
LINUX_ONLY = {
    r"\bos\.sched_[sg]etaffinity\(": r'hasattr\(os, "sched_[sg]etaffinity"\)',
    r"\bselect\.epoll\(": r'hasattr\(select, "epoll"\)',
    r'"/proc/': r"\bOSError\b",
    r"\bprctl\(|\bMADV_|\.madvise\(": r"\bOSError\b|hasattr|sys\.platform|AttributeError",
}


def without_fallback(text: str) -> list[str]:
    """Return the calls of ``text`` that have no fallback in the same module."""
    return [
        call
        for call, fallback in LINUX_ONLY.items()
        if re.search(call, text) and not re.search(fallback, text)
    ]


def test_no_module_has_a_linux_only_call_without_a_fallback() -> None:
    found = {
        str(path.relative_to(SOURCE)): calls
        for path in SOURCE.rglob("*.py")
        if (calls := without_fallback(path.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("os.sched_setaffinity(0, {1})", 1),
        ('if hasattr(os, "sched_setaffinity"):\n    os.sched_setaffinity(0, {1})', 0),
        ('Path("/proc/cpuinfo").read_text()', 1),
        ('try:\n    Path("/proc/cpuinfo").read_text()\nexcept OSError:\n    pass', 0),
    ],
)
def test_a_call_is_found_unless_its_module_asks(text: str, number: int) -> None:
    assert len(without_fallback(text)) == number
