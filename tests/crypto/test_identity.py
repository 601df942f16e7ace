from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from convoy.crypto.certificate import certificate_key, make_certificate
from convoy.crypto.identity import Identity, OperatorKey, verify
from convoy.errors import HandshakeError, IdentityError


def test_a_saved_identity_loads_as_the_same_keys(tmp_path: Path) -> None:
    identity = Identity.generate()
    identity.save(tmp_path / "id")
    loaded = Identity.load(tmp_path / "id")
    assert loaded.public_key == identity.public_key
    assert loaded.tls_certificate_der == identity.tls_certificate_der
    verify(identity.public_key, loaded.sign(b"text"), b"text")


def test_files_are_private_and_so_is_their_directory(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "id")
    OperatorKey.generate().save(tmp_path / "id")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "id").iterdir()}
    assert modes == {"identity.key": 0o600, "tls.key": 0o600, "tls.crt": 0o600, "operator.key": 0o600}
    assert stat.S_IMODE((tmp_path / "id").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["identity.key", "tls.key", "tls.crt"])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, name: str) -> None:
    Identity.generate().save(tmp_path / "id")
    (tmp_path / "id" / name).chmod(0o640)
    with pytest.raises(IdentityError, match=f"{name} has mode 0640, expected 0600"):
        Identity.load(tmp_path / "id")


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "id").mkdir(mode=0o755)
    with pytest.raises(IdentityError, match="mode 0755, expected 0700"):
        Identity.generate().save(tmp_path / "id")


def test_a_directory_that_others_can_enter_is_refused_at_every_start(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "id")
    OperatorKey.generate().save(tmp_path / "id")
    (tmp_path / "id").chmod(0o750)
    for load in (Identity.load, OperatorKey.load):
        with pytest.raises(IdentityError, match="mode 0750, expected 0700"):
            load(tmp_path / "id")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("name", ["identity.key", "tls.key", "tls.crt", "."])
def test_a_key_of_another_user_is_refused(tmp_path: Path, name: str) -> None:
    Identity.generate().save(tmp_path / "id")
    os.chown(tmp_path / "id" / name, os.getuid() + 1, -1)
    with pytest.raises(IdentityError, match=f"belongs to user {os.getuid() + 1}, expected {os.getuid()}"):
        Identity.load(tmp_path / "id")


def test_an_existing_key_is_never_overwritten(tmp_path: Path) -> None:
    first = Identity.generate()
    first.save(tmp_path / "id")
    with pytest.raises(IdentityError, match="exists already"):
        Identity.generate().save(tmp_path / "id")
    assert Identity.load(tmp_path / "id").public_key == first.public_key


def test_a_missing_identity_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(IdentityError) as caught:
        Identity.load(tmp_path)
    assert caught.value.hint is not None


def test_a_certificate_of_another_key_is_refused(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "a")
    Identity.generate().save(tmp_path / "b")
    (tmp_path / "a" / "tls.crt").write_bytes((tmp_path / "b" / "tls.crt").read_bytes())
    with pytest.raises(IdentityError, match=r"tls\.crt is not the certificate of tls\.key"):
        Identity.load(tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"garbage", b"x" * 20_000])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    Identity.generate().save(tmp_path / "id")
    (tmp_path / "id" / "identity.key").write_bytes(content)
    with pytest.raises(IdentityError, match=r"identity\.key"):
        Identity.load(tmp_path / "id")


def test_the_tls_key_is_not_the_identity_key() -> None:
    identity = Identity.generate()
    assert certificate_key(identity.tls_certificate_der) != identity.public_key


def test_certificates_have_distinct_subjects() -> None:
    subjects = {
        x509.load_der_x509_certificate(Identity.generate().tls_certificate_der).subject for _ in range(5)
    }
    assert len(subjects) == 5


def test_a_certificate_followed_by_other_bytes_is_refused() -> None:
    with pytest.raises(IdentityError):
        certificate_key(Identity.generate().tls_certificate_der + b"\0")


def test_a_signature_over_other_text_is_refused() -> None:
    identity = Identity.generate()
    with pytest.raises(HandshakeError):
        verify(identity.public_key, identity.sign(b"text"), b"test")


def test_private_keys_do_not_show_in_a_repr(tmp_path: Path) -> None:
    assert "PRIVATE" not in repr(vars(Identity.generate()))


def odd_certificate(
    key: Ed25519PrivateKey, like: bytes, odd: tuple[str, ...] = (), signer: Ed25519PrivateKey | None = None
) -> bytes:
    """Make a certificate of ``key`` that takes the parts in ``odd`` from another member's certificate."""
    own = x509.load_der_x509_certificate(make_certificate(key))
    other = x509.load_der_x509_certificate(like)
    builder = (
        x509.CertificateBuilder()
        .subject_name((other if "subject" in odd else own).subject)
        .issuer_name((other if "issuer" in odd else own).issuer)
        .public_key(key.public_key())
        .serial_number(5)
        .not_valid_before(own.not_valid_before_utc)
        .not_valid_after(own.not_valid_after_utc)
    )
    for index, extension in enumerate(own.extensions):
        name = extension.oid._name
        if f"no {name}" not in odd:
            found = list((other if name in odd else own).extensions)[index]
            builder = builder.add_extension(found.value, found.critical)
    if "extra" in odd:
        builder = builder.add_extension(x509.OCSPNoCheck(), critical=True)
    return builder.sign(signer or key, None).public_bytes(Encoding.DER)


SKI, AKI = "subjectKeyIdentifier", "authorityKeyIdentifier"


@pytest.mark.parametrize(
    "odd",
    [
        ("subject", "issuer"),
        ("subject", "issuer", SKI, AKI),
        ("subject", "issuer", f"no {SKI}", f"no {AKI}"),
        ("subject",),
        ("issuer",),
        (SKI,),
        (AKI,),
        (f"no {SKI}",),
        (f"no {AKI}",),
        ("extra",),
    ],
    ids=" ".join,
)
def test_a_certificate_cannot_borrow_what_tls_finds_another_member_by(odd: tuple[str, ...]) -> None:
    key, other = Ed25519PrivateKey.generate(), Identity.generate().tls_certificate_der
    certificate_key(odd_certificate(key, other))
    with pytest.raises(IdentityError, match="than convoy derives from its key"):
        certificate_key(odd_certificate(key, other, odd))


def test_a_certificate_that_its_key_did_not_sign_is_refused() -> None:
    key, other = Ed25519PrivateKey.generate(), Identity.generate().tls_certificate_der
    with pytest.raises(IdentityError, match="not signed by its own key"):
        certificate_key(odd_certificate(key, other, signer=Ed25519PrivateKey.generate()))


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_certificate_with_any_bit_flipped_is_an_identity_error_and_no_crash() -> None:
    der = Identity.generate().tls_certificate_der
    for bit in range(8 * len(der)):
        changed = bytearray(der)
        changed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(IdentityError):
            certificate_key(bytes(changed))
