"""The only model that may run here: a file of `convoy manifest sign`, and the key that must sign it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoy.cli.show.files import read_bytes
from convoy.config.settings import Config

if TYPE_CHECKING:
    from convoy.trust.signed_model import SignedModel


def signed_model(config: Config) -> SignedModel | None:
    """Return the model that [model] signed names, or None.

    Raises ConfigError for a file that cannot be read, and ModelError for one that the operator did not sign.
    """
    from convoy.trust.signed_model import MAX_SIGNED_BYTES, verify_signed_model

    file = config.model.signed
    if file is None:
        return None
    data = read_bytes(file, max_bytes=MAX_SIGNED_BYTES)
    return verify_signed_model(data, operator_key=_operator(config))


def _operator(config: Config) -> bytes:
    """Return the operator's present key: the configured one, or the key that it handed over to."""
    from convoy.trust.roster.accepted import AcceptedFile

    configured = config.require_operator_key()
    accepted = None if config.cluster.identity is None else AcceptedFile(config.cluster.identity).load()
    if accepted is None or accepted.configured != configured:
        return configured
    return accepted.trusted
