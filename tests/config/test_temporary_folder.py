"""A temporary folder ends with its process, and the next one finds it where the process was killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.config.temporary_folder import LOCK_NAME, remove_dead_folders, temporary_folder

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
OWNER = """
import sys
from pathlib import Path
from convoy.config.temporary_folder import temporary_folder
with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "identity.key").write_text("secret")
    print(folder, flush=True)
    sys.stdin.read()
"""


def dead(folder: Path) -> Path:
    """Return a folder as a killed process leaves it: nothing holds its lock."""
    folder.mkdir(mode=0o700)
    (folder / LOCK_NAME).touch()
    (folder / "alpha").mkdir()
    (folder / "alpha" / "identity.key").touch()
    return folder


def test_a_folder_is_private_and_goes_at_the_end(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "alpha").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_process_that_ended_goes_at_the_next_start(tmp_path: Path) -> None:
    left = dead(tmp_path / "convoy-left")
    with temporary_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert not left.exists()


@pytest.mark.outside
def test_a_folder_stays_while_its_process_lives_and_goes_after_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": SOURCE}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().decode().strip())
        with temporary_folder(tmp_path):
            assert (folder / "identity.key").read_text() == "secret"
        owner.kill()
    assert (folder / "identity.key").exists()
    with temporary_folder(tmp_path):
        assert not folder.exists()


def test_nothing_else_goes(tmp_path: Path) -> None:
    users = dead(tmp_path / "users-own")
    unlocked = dead(tmp_path / "convoy-without-a-lock")
    (unlocked / LOCK_NAME).unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK_NAME).touch()
    linked = tmp_path / "convoy-link-to-a-folder"
    linked.symlink_to(elsewhere)
    lock_elsewhere = dead(tmp_path / "convoy-link-to-a-lock")
    (lock_elsewhere / LOCK_NAME).unlink()
    (lock_elsewhere / LOCK_NAME).symlink_to(elsewhere / LOCK_NAME)
    (tmp_path / "convoy-file").touch()
    before = sorted(tmp_path.rglob("*"))
    remove_dead_folders(tmp_path, os.geteuid())
    assert sorted(tmp_path.rglob("*")) == before
    assert users.exists()


def test_a_link_inside_a_dead_folder_goes_without_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    (dead(tmp_path / "convoy-left") / "link").symlink_to(target)
    remove_dead_folders(tmp_path, os.geteuid())
    assert sorted(tmp_path.rglob("*")) == [target, target / "kept"]


def test_the_folder_of_another_user_stays(tmp_path: Path) -> None:
    left = dead(tmp_path / "convoy-left")
    remove_dead_folders(tmp_path, os.geteuid() + 1)
    assert left.exists()


def test_a_parent_that_cannot_be_listed_is_no_error(tmp_path: Path) -> None:
    remove_dead_folders(tmp_path / "missing", os.geteuid())
