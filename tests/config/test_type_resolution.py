"""The resolution of types for msgspec."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from convoy.config.type_resolution import resolved

# The annotation of `count` is evaluated while the first thread resolves `Body`. The second thread uses `Body`
# in just that moment: until it is done, or waits in `resolved`.
_TWO_THREADS = """
import sys, threading
import msgspec
from convoy.config.type_resolution import resolved

def whole_number():
    if not second.ident:
        second.start()
        while second.is_alive() and "resolved" not in calls_of(second):
            pass
    return int

def calls_of(thread):
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back

class Part(msgspec.Struct):
    count: "whole_number()"

class Body(msgspec.Struct):
    part: Part

def read():
    found.append(msgspec.convert({"part": {"count": 3}}, resolved(Body)).part.count)

found = []
second = threading.Thread(target=read)
read()
second.join()
assert found == [3, 3], found
"""


@pytest.mark.outside
def test_a_type_that_two_threads_use_first_at_once_is_resolved_by_one_of_them() -> None:
    done = subprocess.run([sys.executable, "-c", _TWO_THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


def test_a_type_comes_back_as_it_is_also_one_that_is_no_class() -> None:
    assert resolved(tuple[int, ...]) == tuple[int, ...]
    assert msgspec.json.decode(b"[1, 2]", type=resolved(tuple[int, ...])) == (1, 2)
