"""What `convoy coordinator` makes of its flags before it listens."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from convoy.cli.coordinator_run import ADMIN_KEY, DoorFlags, _admin_key
from convoy.cli.fleet_config import load_fleet_config
from convoy.cli.home import Home
from convoy.crypto.certificate import certificate_names
from convoy.errors import ConfigError, IdentityError
from convoy.fleet.books.directory import Directory
from convoy.fleet.books.keys import Scope
from convoy.fleet.books.store import Store


def flags(**changes: object) -> DoorFlags:
    made: dict[str, object] = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "tls_certificate": None}
    return DoorFlags(**{**made, "tls_key": None, "behind_tls_proxy": False, **changes})  # type: ignore[arg-type]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """For a name and an address."""
    key, now = Ed25519PrivateKey.generate(), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    names = [x509.DNSName("coordinator.example"), x509.IPAddress(ipaddress.ip_address("192.0.2.1"))]
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(1))
    built = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(key, None)
    file = tmp_path / "tls.pem"
    file.write_bytes(built.public_bytes(Encoding.PEM))
    return file


def test_providers_may_dial_the_names_of_the_certificate(certificate: Path) -> None:
    assert flags(host="0.0.0.0", tls_certificate=certificate).names() == (  # noqa: S104 - what is listened on
        "coordinator.example",
        "192.0.2.1",
    )
    assert "localhost" in flags().names()
    assert "localhost" in flags(tls_certificate=certificate).names()


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        flags(tls_certificate=tmp_path / "nothing.pem").names()
    with pytest.raises(IdentityError):
        certificate_names(b"rubbish")


def test_behind_a_proxy_the_name_must_be_said_and_is_a_host_that_is_answered() -> None:
    with pytest.raises(ConfigError, match="nothing says by which name"):
        flags(behind_tls_proxy=True).names()
    said = flags(behind_tls_proxy=True, authorities=("coordinator.example:443",))
    assert said.names() == ()
    assert said.doors().public.allowed_hosts == ("coordinator.example",)


def test_a_new_database_gets_an_administrators_key_though_a_file_is_there(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (tmp_path / ADMIN_KEY).write_text("convoy-of-another-database\n")
    store = Store(f"sqlite:///{tmp_path / 'fleet.db'}")
    try:
        key = _admin_key(home, store).read_text().strip()
        assert Directory(store).look_up(key, Scope.ADMIN) is None
        assert _admin_key(home, store).read_text().strip() == key, "and keeps it"
    finally:
        store.close()


def test_a_key_of_a_file_that_is_misspelt_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    for text, near in (("[evidnce]", "evidence"), ('[[model]]\nname = "a"\npromt_micro = 1', "prompt_micro")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"coordinator\.toml: .*unknown field") as raised:
            load_fleet_config(file, "one", ())
        assert raised.value.hint == f"did you mean {near}?"
