"""What a report says about the machine that it was made on."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from convoy.bench.report.machine import Watch

BURN = "import time\nwhile time.process_time() < 0.4: pass"


def test_a_machine_is_described_without_its_name() -> None:
    machine = Watch().machine()
    assert machine.num_cores == os.cpu_count()
    assert machine.cpu
    assert os.uname().nodename not in (machine.cpu, machine.system)


def test_the_work_of_our_own_children_is_not_counted_as_that_of_others() -> None:
    num_cores = os.cpu_count() or 1
    watch = Watch()
    started_s = time.monotonic()
    before = os.times()
    children = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(num_cores)]
    assert [child.wait(60) for child in children] == [0] * num_cores
    after = os.times()
    own_s = after.children_user - before.children_user + after.children_system - before.children_system
    share = own_s / (time.monotonic() - started_s) / num_cores
    assert watch.machine().others <= 1 - share + 0.1
