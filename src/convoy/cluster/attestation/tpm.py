"""This machine's TPM 2.0 through `tpm2-tools`: one process for each command, and no shell.

The attestation key is a primary key of the endorsement hierarchy from a fixed template, so the TPM makes
the same key again whenever it is needed. No key is stored, and it survives a reboot and a cleared owner.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.crypto.tpm.endorsement import certificate_prefix
from convoy.crypto.tpm.structures import PCR_BYTES
from convoy.errors import AttestationError

DEFAULT_TCTI = "device:/dev/tpmrm0"
ALGORITHMS = {"ecc": "ecc256:ecdsa-sha256:null", "rsa": "rsa2048:rsassa-sha256:null"}
MAX_FILE_BYTES = 16 * 1024

_ATTRIBUTES = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|restricted|sign"
_TCTI = re.compile(r"[a-z0-9]{1,16}(:[A-Za-z0-9._:/=,\[\]-]{1,200})?")
# NV index of the certificate of the default RSA endorsement key.
_EK_CERTIFICATE = "0x01c00002"
# The header of a credential in a file of tpm2-tools.
_BLOB_HEADER = bytes.fromhex("badcc0de00000001")
# Discrete TPMs take seconds to make an RSA key.
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class EndorsedKeys:
    """Hold the inputs of enrolment: the EK certificate (DER), and both keys' public areas (TPM2B_PUBLIC)."""

    certificate: bytes
    endorsement: bytes
    attestation: bytes


class Tpm:
    """Run commands on one TPM, one call at a time. ``tcti`` has the form of tpm2-tools' own ``--tcti``."""

    def __init__(self, tcti: str = DEFAULT_TCTI) -> None:
        if not _TCTI.fullmatch(tcti):
            raise AttestationError(f"{tcti[:100]!r} does not name a TPM", hint=f"such as {DEFAULT_TCTI}")
        self._tcti = tcti
        self._lock = threading.Lock()

    def keys(self, algorithm: str = "ecc") -> EndorsedKeys:
        """Return both keys, made if need be.

        Raises `AttestationError`, also if the TPM holds no EK certificate.
        """
        with self._work() as work:
            work.run("tpm2_nvread", _EK_CERTIFICATE, "-o", "ek.crt")
            work.run("tpm2_createek", "-c", "ek.ctx", "-G", "rsa", "-u", "ek.pub", "-f", "tss")
            self._make_key(work, algorithm)
            certificate = certificate_prefix(work.read("ek.crt"))
            return EndorsedKeys(certificate, work.read("ek.pub"), work.read("ak.pub"))

    def attestation_public(self, algorithm: str) -> bytes:
        """Return the public area (TPM2B_PUBLIC) of the attestation key. Raises `AttestationError`."""
        with self._work() as work:
            self._make_key(work, algorithm)
            return work.read("ak.pub")

    def activate(self, algorithm: str, id_object: bytes, encrypted_secret: bytes) -> bytes:
        """Return the secret in a credential for this TPM and its attestation key.

        Raises `AttestationError`.
        """
        with self._work() as work:
            work.write("credential", _BLOB_HEADER + id_object + encrypted_secret)
            self._make_key(work, algorithm)
            work.run("tpm2_createek", "-c", "ek.ctx", "-G", "rsa", "-u", "ek.pub", "-f", "tss")
            work.run("tpm2_startauthsession", "--policy-session", "-S", "session", flush=False)
            work.run("tpm2_policysecret", "-S", "session", "-c", "e", flush=False)
            keys = ("-c", "ak.ctx", "-C", "ek.ctx")
            files = ("-i", "credential", "-o", "secret", "-P", "session:session")
            try:
                work.run("tpm2_activatecredential", *keys, *files, flush=False)
            finally:
                work.run("tpm2_flushcontext", "session", checked=False)
            return work.read("secret")

    def quote(self, algorithm: str, qualifying: bytes, pcrs: Sequence[int]) -> list[bytes]:
        """Return the parts of evidence of kind ``tpm2``: public area, quote, signature, register values.

        Raises `AttestationError`.
        """
        selection = "sha256:" + ",".join(map(str, pcrs))
        with self._work() as work:
            self._make_key(work, algorithm)
            what = ("-c", "ak.ctx", "-l", selection, "-q", qualifying.hex(), "-g", "sha256")
            files = ("-m", "quote", "-s", "signature", "-o", "registers", "-F", "values")
            work.run("tpm2_quote", *what, *files)
            values = work.read("registers")
            return [
                work.read("ak.pub"),
                work.read("quote"),
                work.read("signature"),
                *(values[at : at + PCR_BYTES] for at in range(0, len(values), PCR_BYTES)),
            ]

    def _make_key(self, work: _Work, algorithm: str) -> None:
        if algorithm not in ALGORITHMS:
            raise AttestationError(f"{algorithm[:20]!r} is no algorithm, expected {' or '.join(ALGORITHMS)}")
        template = ("-G", ALGORITHMS[algorithm], "-g", "sha256", "-a", _ATTRIBUTES)
        work.run("tpm2_createprimary", "-C", "e", *template, "-c", "ak.ctx")
        work.run("tpm2_readpublic", "-c", "ak.ctx", "-o", "ak.pub", "-f", "tss")

    def _work(self) -> _Work:
        return _Work(self._tcti, self._lock)


class _Work:
    """Hold a temporary directory, and the TPM's lock for as long as the directory exists."""

    def __init__(self, tcti: str, lock: threading.Lock) -> None:
        self._tcti = tcti
        self._lock = lock
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._path = Path()

    def __enter__(self) -> _Work:
        self._lock.acquire()
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="convoy-tpm-")
        except BaseException:
            self._lock.release()
            raise
        self._path = Path(self._folder.name)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()
        self._lock.release()

    def run(self, tool: str, *arguments: str, flush: bool = True, checked: bool = True) -> None:
        """Run one tool. ``flush`` leaves no object in the TPM, which may have three slots and no manager."""
        try:
            done = self._call(tool, *arguments)
            if checked and done.returncode != 0:
                raise AttestationError(f"{tool} failed: {_last_line(done.stderr)}", hint=_hint(done.stderr))
        finally:
            if flush:
                self._call("tpm2_flushcontext", "--transient-object")

    def _call(self, tool: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        path = shutil.which(tool)
        if path is None:
            raise AttestationError(f"{tool} is not installed", hint="apt-get install tpm2-tools")
        command = [path, "--tcti", self._tcti, "--quiet", *arguments]
        try:
            return subprocess.run(
                command,
                cwd=self._path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise AttestationError(
                f"{tool} did not end within {_TIMEOUT_S:g} s", hint="does another program hold the TPM?"
            ) from None

    def read(self, name: str) -> bytes:
        try:
            with (self._path / name).open("rb") as file:
                return file.read(MAX_FILE_BYTES)
        except OSError:
            raise AttestationError(f"tpm2-tools wrote no {name}") from None

    def write(self, name: str, data: bytes) -> None:
        (self._path / name).write_bytes(data)


def _last_line(stderr: bytes) -> str:
    lines = [line for line in stderr.decode(errors="replace").splitlines() if "ERROR" in line]
    return "".join(c if c.isprintable() else "?" for c in (lines or ["no reason given"])[0])[:200]


def _hint(stderr: bytes) -> str | None:
    if b"Permission denied" in stderr:
        return "add this user to the group of the TPM's device, usually tss"
    if b"No such file" in stderr or b"tcti" in stderr.lower():
        return "is there a TPM? name it as tpm in the [cluster] section, such as device:/dev/tpmrm0"
    return None
