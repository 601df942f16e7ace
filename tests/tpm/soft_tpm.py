"""A TPM in software (swtpm) with an endorsement certificate of a certificate authority made for the test."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

_WAIT_S = 15.0
_ENVIRONMENT = {**os.environ, "LC_ALL": "C"}


class TestAuthority:
    """Run swtpm's own local authority, in a folder of its own: a root and an issuer below it."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "localca.conf").write_text(
            f"statedir = {folder}\nsigningkey = {folder}/signkey.pem\n"
            f"issuercert = {folder}/issuercert.pem\ncertserial = {folder}/certserial\n"
        )
        (folder / "localca.options").write_text(
            "--platform-manufacturer Convoy\n--platform-version 1\n--platform-model Test\n"
        )
        (folder / "setup.conf").write_text(
            f"create_certs_tool = {shutil.which('swtpm_localca')}\n"
            f"create_certs_tool_config = {folder}/localca.conf\n"
            f"create_certs_tool_options = {folder}/localca.options\nactive_pcr_banks = sha256\n"
        )

    @property
    def certificates(self) -> Path:
        """Return the PEM file of the issuer, which signs endorsement certificates."""
        return self.folder / "issuercert.pem"

    def make_tpm_state(self, state: Path) -> None:
        """Make a TPM: seeds, an endorsement key, its certificate in the TPM's memory."""
        state.mkdir()
        call(
            *("swtpm_setup", "--tpm2", "--tpmstate", f"dir://{state}", "--create-ek-cert"),
            *("--config", str(self.folder / "setup.conf"), "--pcr-banks", "sha256", "--overwrite"),
            *("--runas", getpass.getuser()),
        )


class SoftTpm:
    """Run a TPM behind a socket. ``tcti`` is its address for tpm2-tools."""

    def __init__(self, authority: TestAuthority) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tpm-"))  # short: a socket's path has 107 characters
        authority.make_tpm_state(self.folder / "state")
        self.tcti = f"swtpm:path={self.folder}/s"
        self._start()

    def _start(self) -> None:
        sockets = {"--server": "s", "--ctrl": "s.ctrl"}
        self._process = subprocess.Popen(
            [
                *("swtpm", "socket", "--tpm2", "--tpmstate", f"dir={self.folder}/state"),
                *(
                    part
                    for flag, name in sockets.items()
                    for part in (flag, f"type=unixio,path={self.folder}/{name}")
                ),
                *("--flags", "not-need-init,startup-clear"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _WAIT_S
        while not (self.folder / "s.ctrl").exists() or not (self.folder / "s").exists():
            assert self._process.poll() is None, "swtpm ended"
            assert time.monotonic() < deadline, "swtpm did not start"
            time.sleep(0.02)  # a socket's file has no event to wait on

    def tool(self, name: str, *arguments: str) -> bytes:
        """Run one of tpm2-tools against this TPM, in its folder; nothing stays loaded."""
        output = call(f"tpm2_{name}", "--tcti", self.tcti, *arguments, folder=self.folder)
        call("tpm2_flushcontext", "--tcti", self.tcti, "--transient-object", folder=self.folder)
        return output

    def extend(self, register: int) -> None:
        """Measure something new into a register: what another boot would do."""
        self.tool("pcrextend", f"{register}:sha256={'ab' * 32}")

    def register(self, index: int) -> str:
        """Return the value of a register of the SHA-256 bank, in hex."""
        self.tool("pcrread", f"sha256:{index}", "-o", "register.bin")
        return (self.folder / "register.bin").read_bytes().hex()

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def __enter__(self) -> SoftTpm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(_WAIT_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def call(*command: str, folder: Path | None = None) -> bytes:
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, env=_ENVIRONMENT, check=False)
    assert done.returncode == 0, (command, done.stdout.decode(), done.stderr.decode())
    return done.stdout
