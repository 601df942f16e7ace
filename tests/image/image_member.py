"""The container image on a Debian from debootstrap, in place of the base that a registry has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE, PACKAGES = "bookworm", "python3,python3-venv,ca-certificates"
PIP_SETTINGS = ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class Image:
    """Build the image in a storage of its own, and run commands in a container of it."""

    def __init__(self, folder: Path) -> None:
        storage = folder / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
        )
        self.env = {**os.environ, "CONTAINERS_STORAGE_CONF": str(storage), "BUILDAH_ISOLATION": "chroot"}
        self._make_base(folder / "base")
        wheels = os.environ.get("PIP_FIND_LINKS", "")
        mount = f"--volume {wheels}:{wheels}:ro" if Path(wheels).is_dir() and wheels else ""
        self.told(
            "make",
            "-o",
            ".venv/.ready",
            "dist",
            f"IMAGE_OPTIONS=--build-arg BASE=localhost/base {mount}",
            cwd=ROOT,
        )
        self.container = self.told("buildah", "from", "localhost/convoy").strip()

    def _make_base(self, base: Path) -> None:
        self.told("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(base))
        # The machine may trust a mirror of its own, and pip may look for wheels in a folder.
        (base / CERTIFICATES.relative_to("/")).write_bytes(CERTIFICATES.read_bytes())
        settings = {
            name: os.environ.get(f"PIP_{name}") for name in ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL")
        }
        lines = [f"{name.lower().replace('_', '-')} = {value}" for name, value in settings.items() if value]
        (base / "etc/pip.conf").write_text("\n".join(["[global]", *lines, ""]))
        container = self.told("buildah", "from", "scratch").strip()
        self.told("buildah", "copy", "--quiet", container, str(base), "/")
        self.told("buildah", "commit", "--quiet", container, "localhost/base")

    def told(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command and return its output."""
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def run(self, *command: str) -> str:
        """Run a command in the container, as the image's user, and return its output."""
        return self.told("buildah", "run", self.container, "--", *command)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    return Image(tmp_path_factory.mktemp("image"))


def test_the_image_runs_as_a_user_that_owns_its_data_and_models(image: Image) -> None:
    assert image.run("id", "-u").strip() == "10001"
    image.run("touch", "/data/key", "/cache/model")


def test_a_container_answers_over_two_members_as_one_process_does(image: Image) -> None:
    assert "equal those of one process: yes" in image.run("convoy", "demo")


def test_a_container_computes_with_the_compiled_code_of_its_wheel(image: Image) -> None:
    assert "prebuilt" in image.run("convoy", "doctor")
