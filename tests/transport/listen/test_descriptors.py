"""The limit of open files, in a process of its own: it is never lowered, and never over the hard limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.outside

_SCRIPT = """
import resource, sys
from convoy.transport.listen.descriptors import descriptor_limit, raise_descriptor_limit
soft, hard, enough = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert raise_descriptor_limit(enough) == descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
@pytest.mark.parametrize(
    ("soft", "hard", "enough", "after"),
    [(256, 1024, 65536, 1024), (256, 1024, 512, 512), (512, 1024, 300, 512), (1024, 1024, 65536, 1024)],
)
def test_the_soft_limit_is_raised_towards_the_hard_one(soft: int, hard: int, enough: int, after: int) -> None:
    arguments = [sys.executable, "-c", _SCRIPT, *map(str, (soft, hard, enough))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(after), str(hard)]
