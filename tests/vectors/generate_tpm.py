"""Makes `tpm_v1.json` from TPMs in software: `python tests/vectors/generate_tpm.py` (swtpm, tpm2-tools).

The keys and certificates are those of a throw-away authority and of TPMs that are gone afterwards; the
identity key is of a fixed seed. Nothing here is secret, and nothing is of a machine.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "src")]

from convoy.cluster.attestation.tpm import Tpm  # noqa: E402
from convoy.crypto.tpm.structures import PCR_BYTES  # noqa: E402
from convoy.trust.evidence.evidence import Occasion, qualifying_data  # noqa: E402
from convoy.wire.messages.claims import Claims, encode_claims  # noqa: E402
from support.tpm_vectors import IDENTITY_KEY  # noqa: E402
from tpm.soft_tpm import SoftTpm, TestAuthority  # noqa: E402

BINDING, NONCE = b"\x11" * 32, b"\x22" * 32
REGISTERS = [0, 7, 16]
CLAIMS = Claims("ab" * 32, {"convoy": "0.1.0", "torch": "2.13.0"}, "Linux test", "", [])
UNRESTRICTED = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|sign"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        authority, other = TestAuthority(Path(name) / "ca"), TestAuthority(Path(name) / "other")
        with SoftTpm(authority) as tpm, SoftTpm(other) as second:
            vectors = _vectors(authority, tpm) | _others(other, tpm, second)
    (HERE / "tpm_v1.json").write_text(json.dumps(vectors, indent=1) + "\n")


def _vectors(authority: TestAuthority, tpm: SoftTpm) -> dict[str, object]:
    claims = encode_claims(CLAIMS)
    qualifying = qualifying_data(Occasion(BINDING, NONCE, IDENTITY_KEY), claims)
    keys = Tpm(tpm.tcti).keys()
    return {
        "made_by": _versions(),
        "binding": BINDING.hex(),
        "nonce": NONCE.hex(),
        "identity_key": IDENTITY_KEY.hex(),
        "claims": _text(claims),
        "qualifying_data": qualifying.hex(),
        "registers": REGISTERS,
        "authority_pem": authority.certificates.read_text(),
        "endorsement_certificate": _text(keys.certificate),
        "endorsement_public": _text(keys.endorsement),
        **{kind: _parts(Tpm(tpm.tcti).quote(kind, qualifying, REGISTERS)) for kind in ("ecc", "rsa")},
        "unrestricted": _parts(_quote_unrestricted(tpm, qualifying)),
    }


def _others(other: TestAuthority, tpm: SoftTpm, second: SoftTpm) -> dict[str, object]:
    qualifying = qualifying_data(Occasion(BINDING, NONCE, IDENTITY_KEY), encode_claims(CLAIMS))
    tpm.extend(16)
    return {
        "other_authority_pem": other.certificates.read_text(),
        "other_machine": _parts(Tpm(second.tcti).quote("ecc", qualifying, REGISTERS)),
        "after_another_boot": _parts(Tpm(tpm.tcti).quote("ecc", qualifying, REGISTERS)),
    }


def _quote_unrestricted(tpm: SoftTpm, qualifying: bytes) -> list[bytes]:
    """Make the same quote by a key that would sign anything else as well."""
    tpm.tool("createprimary", "-C", "e", "-G", "ecc256:ecdsa-sha256:null", "-a", UNRESTRICTED, "-c", "un.ctx")
    tpm.tool("readpublic", "-c", "un.ctx", "-o", "un.pub", "-f", "tss")
    selection = "sha256:" + ",".join(map(str, REGISTERS))
    files = ("-m", "un.quote", "-s", "un.sig", "-o", "un.pcrs", "-F", "values")
    tpm.tool("quote", "-c", "un.ctx", "-l", selection, "-q", qualifying.hex(), "-g", "sha256", *files)
    values = tpm.read("un.pcrs")
    parts = [tpm.read(name) for name in ("un.pub", "un.quote", "un.sig")]
    return parts + [values[at : at + PCR_BYTES] for at in range(0, len(values), PCR_BYTES)]


def _versions() -> str:
    commands = (["swtpm", "--version"], ["tpm2_quote", "--version"])
    lines = [subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands]
    return " and ".join(line.splitlines()[0].strip() for line in lines)


def _parts(parts: list[bytes]) -> list[str]:
    return [_text(part) for part in parts]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


if __name__ == "__main__":
    main()
