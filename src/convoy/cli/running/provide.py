"""``convoy serve --provide``: offer a head and its cluster as one provider of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.operator.certify import read_certificate_file
from convoy.cli.operator.home import Home
from convoy.cli.show.output import print_note
from convoy.config.table import HOST_BATCH
from convoy.errors import UsageError

if TYPE_CHECKING:
    from convoy.api.listen.options import ServeOptions
    from convoy.cluster.head.head import Head
    from convoy.config.settings import Config
    from convoy.crypto.identity import Identity
    from convoy.fleet.capacity import Capacity
    from convoy.fleet.provider.provide import ProvideOptions
    from convoy.fleet.provider.run import ProviderBeside

ProvideFlag = Annotated[
    str | None, typer.Option(help="Also answer for this coordinator, as `convoy provide` does: wss://HOST.")
]
CoordinatorKeyFlag = Annotated[
    str | None, typer.Option(help="Register only with the coordinator that has this key.")
]
CertificateFlag = Annotated[
    Path | None, typer.Option(help="A certificate that an operator signed: see `convoy identity certify`.")
]


def read_coordinator_key(text: str | None) -> bytes | None:
    """Return the key's 32 bytes, or None. Raises `UsageError` for text that is no key."""
    try:
        key = None if text is None else bytes.fromhex(text)
    except ValueError:
        key = b""
    if key is not None and len(key) != 32:
        raise UsageError(
            "--coordinator-key is no key", hint="64 hexadecimal digits, as `convoy coordinator` shows"
        )
    return key


def provider_identity(home: Home, certificate: Path | None) -> tuple[Identity, bytes]:
    """Return the folder's identity, or a new one, and the certificate for it; empty without a file.

    Raises `IdentityError` and `ConfigError`. Then no key has been made.
    """
    found = home.find_identity()
    own = None if found is None else found.public_key
    certified = b"" if certificate is None else read_certificate_file(certificate, own)
    return found or home.open_identity(), certified


@dataclass(frozen=True, slots=True)
class Providing:
    """Hold the flags of a provider. Call `begin` once the head answers."""

    url: str
    coordinator_key: bytes | None
    certificate: bytes
    identity: Identity
    slots: int

    @classmethod
    def of(
        cls,
        url: str | None,
        coordinator_key: str | None,
        certificate: Path | None,
        settings: Config,
        home: Path,
    ) -> Providing | None:
        """Return the provider, or None without --provide. Raises `UsageError` and `ConfigError`."""
        if url is None:
            if coordinator_key is not None or certificate is not None:
                flag = "--certificate" if coordinator_key is None else "--coordinator-key"
                raise UsageError(
                    f"{flag} is for --provide", hint="--provide wss://HOST names the coordinator"
                )
            return None
        # Only a provider needs the extra fleet.
        from convoy.crypto.identity import Identity
        from convoy.fleet.provider.provide import ProvideOptions

        ProvideOptions(url, {}).check()
        key = read_coordinator_key(coordinator_key)
        folder = settings.cluster.identity
        if folder is None:
            identity, certified = provider_identity(Home(home), certificate)
        else:
            identity, certified = Identity.load(folder), b""
            if certificate is not None:
                certified = read_certificate_file(certificate, identity.public_key)
        return cls(url, key, certified, identity, settings.engine.max_batch or HOST_BATCH)

    def begin(
        self, head_url: str, head: Head, listens: ServeOptions, key: str | None, *, quiet: bool
    ) -> ProviderBeside:
        """Return a provider that runs on a thread, for the head at ``head_url`` with options ``listens``.

        ``key`` is the provider's own API key there, or None for a head that asks for none.
        """
        from convoy.cluster.head.provider_evidence import evidence_source_of
        from convoy.fleet.provider.provide import ProvideOptions
        from convoy.fleet.provider.run import ProviderBeside
        from convoy.fleet.provider.upstream import Upstream

        def say(_kind: str, text: str) -> None:
            if not quiet:
                print_note(text)

        def options(offers: dict[str, Capacity]) -> ProvideOptions:
            return ProvideOptions(
                self.url,
                offers,
                coordinator_key=self.coordinator_key,
                certificate=self.certificate,
                events=lambda text: say("coordinator", text),
                traces=listens.traces,
                evidence_source=evidence_source_of(head, self.identity),
            )

        say("key", f"this provider's key is {self.identity.public_key.hex()}")
        certificate = None if listens.tls is None else listens.tls[0]
        upstream = Upstream(head_url, key, certificate)
        return ProviderBeside(upstream, self.identity, options, slots=self.slots, say=say)
