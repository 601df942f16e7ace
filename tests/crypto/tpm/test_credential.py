"""A credential opens with the right endorsement key and the right key's name, and with nothing else."""

from __future__ import annotations

import datetime
import hashlib
import hmac

import pytest
from cryptography import x509
from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES

from convoy.crypto.tpm.credential import make_credential
from convoy.crypto.tpm.endorsement import certificate_prefix, check_endorsement, read_authorities
from convoy.crypto.tpm.structures import check_endorsement_key, key_algorithm, parse_public
from convoy.errors import AttestationError, ConfigError
from support.tpm_vectors import recorded, recorded_parts, sized, vectors

NOW = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
AUTHORITIES = read_authorities(vectors()["authority_pem"].encode(), "ca.pem")
STRANGERS = read_authorities(vectors()["other_authority_pem"].encode(), "other.pem")


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def endorsement_area(
    key: rsa.RSAPrivateKey, attributes: str = "00030072", symmetric: str = "000600800043"
) -> bytes:
    modulus = key.public_key().public_numbers().n.to_bytes(256, "big")
    area = bytes.fromhex("0001000b" + attributes + "0000" + symmetric + "0010" + "0800" + "00000000")
    return sized(area + sized(modulus))


def open_credential(key: rsa.RSAPrivateKey, name: bytes, id_object: bytes, encrypted_seed: bytes) -> bytes:
    """Open a credential as a TPM does (Part 3, 12.5 and Part 1, 24.4), apart from the code under test."""
    seed = key.decrypt(
        encrypted_seed[2:], padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), b"IDENTITY\0")
    )
    outer, body = id_object[4:36], id_object[36:]
    integrity = hmac.new(seed, b"\0\0\0\1INTEGRITY\0" + (256).to_bytes(4, "big"), hashlib.sha256).digest()
    if hmac.new(integrity, body + name, hashlib.sha256).digest() != outer:
        raise PermissionError
    storage = hmac.new(seed, b"\0\0\0\1STORAGE\0" + name + (128).to_bytes(4, "big"), hashlib.sha256).digest()
    decryptor = Cipher(AES(storage[:16]), CFB(bytes(16))).decryptor()
    return (decryptor.update(body) + decryptor.finalize())[2:]


def test_the_right_machine_and_key_open_it(key: rsa.RSAPrivateKey) -> None:
    name = parse_public(recorded_parts("ecc")[0]).name
    blobs = make_credential(parse_public(endorsement_area(key)), name, b"s" * 32)
    assert open_credential(key, name, *blobs) == b"s" * 32


def test_it_does_not_open_for_another_attestation_key(key: rsa.RSAPrivateKey) -> None:
    name, other = (parse_public(recorded_parts(kind)[0]).name for kind in ("ecc", "other_machine"))
    blobs = make_credential(parse_public(endorsement_area(key)), name, b"s" * 32)
    with pytest.raises(PermissionError):
        open_credential(key, other, *blobs)


def test_it_does_not_open_in_another_machine(key: rsa.RSAPrivateKey) -> None:
    name = parse_public(recorded_parts("ecc")[0]).name
    blobs = make_credential(parse_public(recorded("endorsement_public")), name, b"s" * 32)
    with pytest.raises(ValueError, match=r"[Dd]ecryption"):
        open_credential(key, name, *blobs)


@pytest.mark.parametrize(
    ("attributes", "symmetric", "reason"),
    [
        ("00020072", "000600800043", "not restricted"),
        ("00010072", "000600800043", "not decrypt"),
        ("00070072", "000600800043", "is sign"),
        ("00030070", "000600800043", "not fixedTPM"),
        ("00030072", "000601000043", "AES-128-CFB"),
        ("00030072", "0010", "AES-128-CFB"),
    ],
)
def test_another_kind_of_endorsement_key_gets_no_credential(
    key: rsa.RSAPrivateKey, attributes: str, symmetric: str, reason: str
) -> None:
    area = parse_public(endorsement_area(key, attributes, symmetric))
    with pytest.raises(AttestationError, match=reason):
        make_credential(area, b"\0\x0b" + bytes(32), b"s" * 32)


def test_a_recorded_endorsement_certificate_leads_to_its_authority() -> None:
    endorsement = parse_public(recorded("endorsement_public"))
    check_endorsement_key(endorsement)
    found = check_endorsement(recorded("endorsement_certificate"), endorsement.key, AUTHORITIES, NOW)
    assert found == "CN=swtpm-localca"


@pytest.mark.parametrize(
    ("authorities", "now", "reason"),
    [
        (STRANGERS, NOW, "does not lead to an authority of the policy"),
        (AUTHORITIES, datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), "does not lead to an authority"),
        ([], NOW, "no authority is trusted"),
    ],
)
def test_an_endorsement_certificate_of_another_authority_or_time_is_refused(
    authorities: list[bytes], now: datetime.datetime, reason: str
) -> None:
    endorsement = parse_public(recorded("endorsement_public"))
    with pytest.raises(AttestationError, match=reason):
        check_endorsement(recorded("endorsement_certificate"), endorsement.key, authorities, now)


def test_an_endorsement_certificate_for_another_key_is_refused(key: rsa.RSAPrivateKey) -> None:
    with pytest.raises(AttestationError, match="for another key"):
        check_endorsement(recorded("endorsement_certificate"), key.public_key(), AUTHORITIES, NOW)


def test_the_authoritys_own_certificate_is_no_endorsement_certificate() -> None:
    authority = x509.load_der_x509_certificate(AUTHORITIES[0])
    with pytest.raises(AttestationError):
        check_endorsement(AUTHORITIES[0], authority.public_key(), AUTHORITIES, NOW)


@pytest.mark.parametrize("end", [0, 1, 10, 500, -1])
def test_a_cut_endorsement_certificate_is_refused(end: int) -> None:
    with pytest.raises(AttestationError, match="cannot be read"):
        check_endorsement(recorded("endorsement_certificate")[:end], None, AUTHORITIES, NOW)


def test_an_oversized_endorsement_certificate_is_refused_unread() -> None:
    with pytest.raises(AttestationError, match="the limit is 8192"):
        check_endorsement(bytes(8193), None, AUTHORITIES, NOW)


def test_padding_behind_a_certificate_in_a_tpm_is_cut_off() -> None:
    certificate = recorded("endorsement_certificate")
    assert certificate_prefix(certificate + b"\xff" * 300) == certificate


def test_a_file_without_certificates_is_named() -> None:
    with pytest.raises(ConfigError, match=r"ca\.pem holds no certificates"):
        read_authorities(b"nothing", "ca.pem")


def test_the_algorithm_of_an_enrolled_key_is_known_from_the_roster_alone() -> None:
    for kind in ("ecc", "rsa"):
        assert key_algorithm(parse_public(recorded_parts(kind)[0]).key_der) == kind
    with pytest.raises(AttestationError, match="SubjectPublicKeyInfo"):
        key_algorithm(b"none")
