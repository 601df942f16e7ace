"""What a command does before it imports torch, and how its process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.cli.running.start import ask_for_huge_pages, keep_nccl_on_loopback, wait_briefly_for_threads

_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ASKS = """
from convoy.cli.running.start import ask_for_huge_pages
ask_for_huge_pages()
import torch
kept = torch.ones(64 << 20)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")))
"""


def test_the_operator_has_the_last_word_about_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    ask_for_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


def test_threads_that_wait_spin_briefly_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    wait_briefly_for_threads()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    wait_briefly_for_threads()
    assert os.environ["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    wait_briefly_for_threads()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_nccl_listens_on_loopback_whatever_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    keep_nccl_on_loopback()
    assert os.environ["NCCL_SOCKET_IFNAME"] == ("lo" if sys.platform == "linux" else "lo0")


@pytest.mark.skipif(
    not _HUGE.is_file() or "[madvise]" not in _HUGE.read_text(),
    reason="only a Linux that gives huge pages to who asks, and to nobody else, shows whether one asked",
)
@pytest.mark.long
def test_what_is_large_lies_in_huge_pages_once_they_were_asked_for() -> None:
    asked = [sys.executable, "-c", _ASKS]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) > 128 * 1024


IN_NATIVE_CODE = """
import sys, threading
from convoy.cli.running.start import leave_interpreter
end = leave_interpreter()
import torch

numbers, begun = torch.ones(300, 300), threading.Event()

def compute():
    while True:
        torch.mm(numbers, numbers)
        begun.set()

def finish():
    begun.wait()
    print("finished")

for _ in range(3):
    threading.Thread(target=compute, daemon=True).start()
threading.Thread(target=finish).start()
end(3)
"""


def test_a_process_ends_with_its_status_though_threads_compute() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IN_NATIVE_CODE], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "finished\n", "")
