"""That an invitation is used once: on disk, for every process, whatever happens in between."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from convoy.errors import IdentityError, InviteError
from convoy.trust.consumption import ENROLLED, Consumption, forget, unfinished

ID = "0123456789abcdef" * 2


def test_an_invitation_is_used_once(tmp_path: Path) -> None:
    record = Consumption(tmp_path / "invites", ID)
    assert not record.used
    record.consume("beta")
    assert record.used
    with pytest.raises(InviteError, match="used up"):
        record.consume("gamma")
    assert unfinished(record.directory) == ["beta"]


def test_a_restarted_process_finds_it_used(tmp_path: Path) -> None:
    Consumption(tmp_path / "invites", ID).consume("beta")
    again = Consumption(tmp_path / "invites", ID)
    assert again.used
    with pytest.raises(InviteError):
        again.consume("gamma")


def _use(directory: Path, number: int, won: multiprocessing.Queue[int]) -> None:
    try:
        Consumption(directory, ID).consume(f"process {number}")
    except InviteError:
        return
    won.put(number)


@pytest.mark.outside
def test_of_eight_processes_one_uses_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    won: multiprocessing.Queue[int] = context.Queue()
    directory = tmp_path / "invites"
    processes = [context.Process(target=_use, args=(directory, number, won)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    winner = won.get(timeout=60)
    assert won.empty()
    assert unfinished(directory) == [f"process {winner}"]


def test_a_directory_that_others_can_enter_uses_nothing_up(tmp_path: Path) -> None:
    directory = tmp_path / "invites"
    directory.mkdir(mode=0o755)
    record = Consumption(directory, ID)
    with pytest.raises(IdentityError):
        record.consume("beta")
    assert not record.used


def test_a_crash_before_the_outcome_is_told_once(tmp_path: Path) -> None:
    directory = tmp_path / "invites"
    Consumption(directory, ID).consume("beta from 192.0.2.8")
    done = Consumption(directory, "f" * 32)
    done.consume("gamma")
    done.end(ENROLLED)
    assert unfinished(directory) == ["beta from 192.0.2.8"]
    forget(directory)
    assert unfinished(directory) == []
    assert Consumption(directory, ID).used


def test_no_directory_is_no_invitation(tmp_path: Path) -> None:
    assert unfinished(tmp_path / "nothing") == []
    forget(tmp_path / "nothing")
