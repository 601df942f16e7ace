"""The lock files: what they hold, and what `scripts/lock.py --check` refuses."""

from __future__ import annotations

import copy
import os
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lock
import sbom


@pytest.fixture
def project() -> dict[str, Any]:
    return tomllib.loads((lock.ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in lock.LOCKS:
        (tmp_path / name).write_bytes((lock.ROOT / name).read_bytes())
    return tmp_path


def test_the_locks_are_current(project: dict[str, Any]) -> None:
    assert lock.problems(project, lock.ROOT) == []


def test_a_dependency_that_was_added_since_is_named(project: dict[str, Any], folder: Path) -> None:
    changed = copy.deepcopy(project)
    changed["project"]["dependencies"].append("left-pad>=1")
    found = lock.problems(changed, folder)
    assert f"{lock.LOCK} does not hold left-pad" in found
    assert f"{lock.LOCK} was made from other dependencies than pyproject.toml has now" in found


def test_a_version_that_is_too_old_is_named_with_both_versions(project: dict[str, Any], folder: Path) -> None:
    project["project"]["dependencies"].append("numpy>=99")
    pinned = lock.read_locks(folder)[lock.LOCK]["numpy"].version
    assert f"{lock.LOCK} holds numpy {pinned}, expected >=99" in lock.problems(project, folder)


def test_a_dependency_of_the_documentation_makes_its_own_lock_old_and_no_other(
    project: dict[str, Any], folder: Path
) -> None:
    changed = copy.deepcopy(project)
    changed["project"]["optional-dependencies"]["docs"].append("left-pad>=1")
    assert lock.problems(changed, folder) == [
        f"{lock.DOCS_LOCK} was made from other dependencies than pyproject.toml has now",
        f"{lock.DOCS_LOCK} does not hold left-pad",
    ]


def test_the_lock_of_the_documentation_agrees_with_those_of_the_package() -> None:
    locks = lock.read_locks(lock.ROOT)
    package = {**locks[lock.LOCK], **locks[lock.DEV_LOCK]}
    shared = set(locks[lock.DOCS_LOCK]) & set(package)
    assert len(shared) > 5
    assert {name for name in shared if locks[lock.DOCS_LOCK][name].version != package[name].version} == set()


@pytest.mark.parametrize("line", ["--index-url=https://example.org", "a @ https://example.org/a.whl"])
def test_an_address_is_refused(project: dict[str, Any], folder: Path, line: str) -> None:
    with (folder / lock.LOCK).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    assert lock.problems(project, folder) == [
        f"{lock.LOCK} holds an address or an option, expected packages only"
    ]


def test_a_package_without_a_hash_is_refused(project: dict[str, Any], folder: Path) -> None:
    with (folder / lock.DEV_LOCK).open("a", encoding="utf-8") as file:
        file.write("left-pad==1.0\n")
    assert f"{lock.DEV_LOCK}: left-pad==1.0 has no hash" in lock.problems(project, folder)


def test_packages_for_cuda_stand_in_their_own_lock_alone() -> None:
    locks = lock.read_locks(lock.ROOT)
    assert all(lock.CUDA_ONLY.match(name) for name in locks[lock.CUDA_LOCK])
    assert not [
        name for part in (lock.LOCK, lock.DEV_LOCK) for name in locks[part] if lock.CUDA_ONLY.match(name)
    ]


def test_the_locks_hold_whatever_a_locked_package_needs_here() -> None:
    locks = lock.read_locks(lock.ROOT)
    del locks[lock.CPU_LOCK], locks[lock.DOCS_LOCK]
    pins = {name: pin for part in locks.values() for name, pin in part.items()}
    for name, pin in pins.items():
        try:
            assert metadata.version(name).partition("+")[0] == pin.version
        except metadata.PackageNotFoundError:
            # Another platform needs it, or a CUDA build does.
            assert ";" in pin.line or lock.CUDA_ONLY.match(name), f"{name} is locked and not installed"
        assert sbom.needs_of(name) <= set(pins)


def test_a_wheel_that_is_no_cpu_build_of_the_locked_version_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-1.0+cpu-py3-none-any.whl"
    wheel.write_bytes(b"")
    with pytest.raises(SystemExit, match=r"is not torch==2\.0\+cpu"):
        lock.cpu_build(lock.Pin("torch==2.0"), None, [wheel])


def test_the_hash_of_a_cpu_build_stays_as_long_as_the_version_does(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.0+cpu-py3-none-any.whl"
    wheel.write_bytes(b"")
    made = lock.cpu_build(lock.Pin("torch==2.0"), None, [wheel])
    assert made.line == "torch==2.0+cpu"
    assert lock.cpu_build(lock.Pin("torch==2.0"), made, []) == made
    assert lock.cpu_build(lock.Pin("torch==2.1"), made, []).hashes == ()


def test_the_lock_for_users_holds_both_builds_of_torch() -> None:
    locks = lock.read_locks(lock.ROOT)
    cpu = locks[lock.CPU_LOCK]["torch"]
    assert cpu.version == locks[lock.LOCK]["torch"].version + "+cpu"
    assert set(cpu.hashes) < set(locks[lock.LOCK]["torch"].hashes)


def test_the_bill_of_materials_has_every_package_that_users_get(project: dict[str, Any]) -> None:
    bom = sbom.make_bom(lock.ROOT)
    names = {component.name for component in bom.components}
    locks = lock.read_locks(lock.ROOT)
    assert names == {*locks[lock.LOCK], *locks[lock.CUDA_LOCK]}
    assert {canonicalize_name(Requirement(line).name) for line in project["project"]["dependencies"]} <= names
    torch = next(component for component in bom.components if component.name == "torch")
    held = {one.content for file in torch.external_references for one in file.hashes}
    assert {f"sha256:{one}" for one in held} == set(locks[lock.LOCK]["torch"].hashes)


def test_a_package_without_a_wheel_for_macs_is_named_with_its_python(
    project: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(
        "#!/bin/sh\n"
        'case "$*" in *3.13) echo "some has no wheels with a matching platform tag" >&2; exit 1;; esac\n'
        'case "$*" in *"--only-binary :all: --python-platform aarch64-"*) echo some==1.0;; esac\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (missing,) = lock.without_mac_wheels(project, lock.ROOT)
    assert missing == "Python 3.13 on macOS 14.0: some has no wheels with a matching platform tag"
    assert "macOS 14.0, Python 3.12: 1 packages have a wheel" in capsys.readouterr().out
