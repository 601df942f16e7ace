from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.crypto.certificate import certificate_fingerprint
from convoy.crypto.cipher import Cipher
from convoy.crypto.handshake import NO_LINK, HandshakeContext, Initiator, Party, Responder, Secrets
from convoy.crypto.identity import Identity
from convoy.errors import HandshakeError, Incompatible, PeerError

BOTH = (Cipher.AES_256_GCM, Cipher.CHACHA20_POLY1305)
CHACHA = (Cipher.CHACHA20_POLY1305,)
ALPHA, BETA, MALLORY = Identity.generate(), Identity.generate(), Identity.generate()


def party(name: str, identity: Identity) -> Party:
    return Party(name, identity.public_key, certificate_fingerprint(identity.tls_certificate_der))


CONTEXT = HandshakeContext(party("alpha", ALPHA), party("beta", BETA), b"l" * 16, "home", 3, b"d" * 32)


def run(initiator: Initiator, responder: Responder) -> tuple[Secrets, Secrets]:
    responder.consume_1(initiator.create_1())
    initiator.consume_2(responder.create_2())
    message_3, mine = initiator.create_3()
    return mine, responder.consume_3(message_3)


def both_ends(
    context: HandshakeContext = CONTEXT, other: HandshakeContext = CONTEXT, ciphers: tuple[Cipher, ...] = BOTH
) -> tuple[Initiator, Responder]:
    return Initiator(context, ALPHA.sign, BOTH), Responder(other, BETA.sign, ciphers)


def test_both_ends_get_the_same_keys_crosswise() -> None:
    mine, theirs = run(*both_ends())
    assert mine.send == theirs.receive
    assert mine.receive == theirs.send
    assert mine.send != mine.receive
    assert mine.transcript == theirs.transcript


def test_two_handshakes_never_share_a_key() -> None:
    secrets = [run(*both_ends())[0] for _ in range(3)]
    assert len({bytes(key) for s in secrets for key in (s.send, s.receive)}) == 6


def test_aes_is_chosen_only_where_both_have_it() -> None:
    assert run(*both_ends())[0].cipher is Cipher.AES_256_GCM
    assert run(*both_ends(ciphers=CHACHA))[0].cipher is Cipher.CHACHA20_POLY1305


def test_secrets_do_not_show_in_a_repr() -> None:
    secrets, _ = run(*both_ends())
    assert secrets.send.hex() not in repr(secrets)
    assert repr(secrets.send) not in repr(secrets)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"link_id": b"x" * 16}, "another link"),
        ({"cluster_id": "away"}, "another cluster"),
        ({"initiator": party("gamma", ALPHA)}, "another initiator"),
        ({"responder": party("gamma", BETA)}, "another responder"),
    ],
)
def test_a_claim_that_differs_is_refused_by_name(change: dict[str, object], named: str) -> None:
    initiator, responder = both_ends(context=replace(CONTEXT, **change))  # type: ignore[arg-type]
    with pytest.raises(HandshakeError, match=named):
        responder.consume_1(initiator.create_1())


def test_another_roster_epoch_goes_on_and_both_ends_know_the_others() -> None:
    older = replace(CONTEXT, roster_epoch=2, roster_digest=b"o" * 32)
    mine, theirs = run(*both_ends(context=older))
    assert (mine.peer_epoch, theirs.peer_epoch) == (3, 2)


def test_another_roster_of_the_same_epoch_at_the_responder_is_refused() -> None:
    initiator, responder = both_ends(other=replace(CONTEXT, roster_digest=b"e" * 32))
    message_1 = initiator.create_1()
    at = message_1.index(CONTEXT.roster_digest)
    responder.consume_1(message_1[:at] + b"e" * 32 + message_1[at + 32 :])
    with pytest.raises(Incompatible, match="another roster of the same epoch 3"):
        initiator.consume_2(responder.create_2())


def test_the_epoch_that_the_responder_names_is_covered_by_its_proof() -> None:
    initiator, responder = both_ends()
    responder.consume_1(initiator.create_1())
    message_2 = bytearray(responder.create_2())
    message_2[3:11] = (4).to_bytes(8, "big")
    with pytest.raises(HandshakeError, match="the MAC of beta"):
        initiator.consume_2(bytes(message_2))


def test_both_ends_know_which_link_is_to_be_replaced() -> None:
    mine, theirs = run(*both_ends(context=replace(CONTEXT, replaces=b"o" * 16)))
    assert mine.replaces == theirs.replaces == b"o" * 16
    mine, theirs = run(*both_ends())
    assert mine.replaces == theirs.replaces == NO_LINK


def test_the_binding_is_the_same_at_both_ends_and_new_in_each_handshake() -> None:
    pairs = [run(*both_ends()) for _ in range(3)]
    assert all(mine.binding == theirs.binding for mine, theirs in pairs)
    assert len({mine.binding for mine, _ in pairs}) == 3
    assert {len(mine.binding) for mine, _ in pairs} == {32}
    assert pairs[0][0].binding not in (pairs[0][0].send, pairs[0][0].receive)


def test_another_roster_of_the_same_epoch_is_refused() -> None:
    initiator, responder = both_ends(context=replace(CONTEXT, roster_digest=b"e" * 32))
    with pytest.raises(Incompatible, match="another roster of the same epoch 3"):
        responder.consume_1(initiator.create_1())


def test_another_version_names_both_versions() -> None:
    initiator, responder = both_ends(context=replace(CONTEXT, version=2))
    with pytest.raises(
        Incompatible, match="alpha speaks protocol version 2, and this member speaks version 1"
    ):
        responder.consume_1(initiator.create_1())


def test_another_tls_certificate_at_one_end_fails_the_proof() -> None:
    seen = replace(CONTEXT, initiator=replace(CONTEXT.initiator, certificate_fingerprint=b"m" * 32))
    initiator, responder = both_ends(other=seen)
    responder.consume_1(initiator.create_1())
    with pytest.raises(HandshakeError, match="the MAC of beta"):
        initiator.consume_2(responder.create_2())


def test_a_responder_without_the_identity_key_is_refused() -> None:
    initiator, _ = both_ends()
    impostor = Responder(CONTEXT, MALLORY.sign, BOTH)
    impostor.consume_1(initiator.create_1())
    with pytest.raises(HandshakeError, match="not by the identity key of beta"):
        initiator.consume_2(impostor.create_2())


def test_an_initiator_without_the_identity_key_is_refused() -> None:
    _, responder = both_ends()
    impostor = Initiator(CONTEXT, MALLORY.sign, BOTH)
    responder.consume_1(impostor.create_1())
    impostor.consume_2(responder.create_2())
    message_3, _ = impostor.create_3()
    with pytest.raises(HandshakeError, match="not by the identity key of alpha"):
        responder.consume_3(message_3)


def test_a_reflected_proof_is_refused() -> None:
    initiator, responder = both_ends()
    responder.consume_1(initiator.create_1())
    message_2 = responder.create_2()
    with pytest.raises(HandshakeError):
        responder.consume_3(message_2[-96:])


def test_a_recorded_first_message_gains_nothing() -> None:
    initiator, responder = both_ends()
    message_1 = initiator.create_1()
    responder.consume_1(message_1)
    initiator.consume_2(responder.create_2())
    message_3, _ = initiator.create_3()
    again = Responder(CONTEXT, BETA.sign, BOTH)
    again.consume_1(message_1)
    again.create_2()
    with pytest.raises(HandshakeError, match="the MAC of alpha"):
        again.consume_3(message_3)


def test_a_downgrade_of_the_offer_is_noticed() -> None:
    initiator, responder = both_ends()
    message_1 = initiator.create_1()
    assert message_1[-3:] == bytes([2, 1, 2])
    responder.consume_1(message_1[:-3] + bytes([1, 2]))
    with pytest.raises(HandshakeError, match="the MAC of beta"):
        initiator.consume_2(responder.create_2())


def test_a_cipher_that_was_not_offered_is_refused() -> None:
    initiator = Initiator(CONTEXT, ALPHA.sign, CHACHA)
    _, responder = both_ends()
    responder.consume_1(initiator.create_1())
    message_2 = bytearray(responder.create_2())
    message_2[2] = Cipher.AES_256_GCM
    with pytest.raises(HandshakeError, match="was not offered"):
        initiator.consume_2(bytes(message_2))


def test_a_share_of_small_order_is_refused() -> None:
    initiator, responder = both_ends()
    message_1 = bytearray(initiator.create_1())
    end = len(message_1) - 3
    message_1[end - 1184 - 32 : end - 1184] = bytes(32)
    responder.consume_1(bytes(message_1))
    with pytest.raises(HandshakeError, match="small order"):
        responder.create_2()


def test_calls_out_of_order_are_refused_and_end_the_handshake() -> None:
    initiator, responder = both_ends()
    with pytest.raises(HandshakeError, match="out of order"):
        initiator.create_3()
    with pytest.raises(HandshakeError, match="out of order"):
        initiator.create_1()
    with pytest.raises(HandshakeError, match="out of order"):
        responder.consume_3(bytes(96))


def test_nothing_goes_on_after_a_failed_message() -> None:
    initiator, responder = both_ends()
    responder.consume_1(initiator.create_1())
    message_2 = responder.create_2()
    with pytest.raises(HandshakeError):
        initiator.consume_2(message_2[:-1] + b"\0" if message_2[-1] else message_2[:-1] + b"\1")
    with pytest.raises(HandshakeError, match="out of order"):
        initiator.consume_2(message_2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_any_message_is_refused(data: st.DataObject) -> None:
    initiator, responder = both_ends()
    which = data.draw(st.integers(1, 3))

    def pass_on(number: int, message: bytes) -> bytes:
        if number != which:
            return message
        bit = data.draw(st.integers(0, 8 * len(message) - 1))
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << (bit % 8)
        return bytes(changed)

    def go() -> None:
        responder.consume_1(pass_on(1, initiator.create_1()))
        initiator.consume_2(pass_on(2, responder.create_2()))
        responder.consume_3(pass_on(3, initiator.create_3()[0]))

    with pytest.raises((HandshakeError, Incompatible)):
        go()


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=3000))
def test_garbage_is_refused_as_an_error_of_the_peer(garbage: bytes) -> None:
    initiator, responder = both_ends()
    initiator.create_1()
    with pytest.raises(PeerError):
        initiator.consume_2(garbage)
    with pytest.raises(PeerError):
        responder.consume_1(garbage)


@pytest.mark.parametrize("size", [0, 1, 2, 17, 18, 33, 34, 76, 116, 1200, 1296])
def test_a_truncated_first_message_is_refused(size: int) -> None:
    initiator, responder = both_ends()
    with pytest.raises(HandshakeError):
        responder.consume_1(initiator.create_1()[:size])
