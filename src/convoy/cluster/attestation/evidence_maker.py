"""The proving side: claims about this process, and a quote of this machine if its TPM is enrolled."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from convoy.cluster.attestation.claims import own_claims
from convoy.cluster.attestation.tpm import Tpm
from convoy.crypto.tpm.structures import key_algorithm
from convoy.errors import AttestationError
from convoy.transport.member import LocalMember
from convoy.trust.evidence.evidence import Occasion, make_evidence, qualifying_data
from convoy.trust.evidence.verify import TPM2
from convoy.wire.messages.claims import Claims, encode_claims
from convoy.wire.messages.evidence import Challenge, Evidence

_log = logging.getLogger(__name__)


class Hardware(Protocol):
    """Prove this machine with one kind of hardware. `trust.evidence.verify` has the verifier of each kind."""

    kind: str

    def statement(self, me: LocalMember, qualifying: bytes, registers: Sequence[int]) -> list[bytes]:
        """Return the parts of the evidence, signed by the enrolled key over ``qualifying``.

        Raises `AttestationError`.
        """


class TpmHardware:
    """Prove this machine with a TPM 2.0, if the roster lists its attestation key."""

    kind = TPM2

    def __init__(self, tpm: Tpm) -> None:
        self._tpm = tpm

    def statement(self, me: LocalMember, qualifying: bytes, registers: Sequence[int]) -> list[bytes]:
        return self._tpm.quote(key_algorithm(me.member.attestation_key), qualifying, registers)


class EvidenceMaker:
    """Make evidence. Hardware is slow, so call it on no thread that a token waits for."""

    def __init__(self, hardware: Hardware | None = None, claims: Claims | None = None) -> None:
        self._hardware = hardware
        self._known = claims
        # The digest of the model of the stage that is loaded here.
        self.model = ""

    @property
    def claims(self) -> Claims:
        return msgspec.structs.replace(self.software, model=self.model)

    @functools.cached_property
    def software(self) -> Claims:
        """Return the claims about this member's software, without a model."""
        return self._known or own_claims()

    def prove(self, me: LocalMember, binding: bytes, challenge: Challenge) -> Evidence:
        """Return evidence for one challenge on one link.

        If the hardware fails, this member still signs its claims: the verdict is then ``self_signed``.
        """
        claims = encode_claims(self.claims)
        occasion = Occasion(binding, challenge.nonce, me.identity.public_key)
        statement: tuple[str, Sequence[bytes]] = ("", ())
        if self._hardware is not None and me.member.attestation_key:
            try:
                qualifying = qualifying_data(occasion, claims)
                parts = self._hardware.statement(me, qualifying, challenge.pcrs)
                statement = (self._hardware.kind, parts)
            except AttestationError as error:
                _log.warning("this machine could not be proved: %s", error.message)
        return make_evidence(me.identity.sign, occasion, claims, statement)
