"""What a member believes over its whole life: restarts, rollbacks, handovers, and touched files."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import ConfigError, IdentityError, RosterError
from convoy.transport.member import Roster
from convoy.transport.membership import Membership
from convoy.trust.roster.accepted import AcceptedFile
from convoy.trust.roster.authority import OpenedRoster, OperatorAuthority, open_membership
from convoy.trust.roster.card import member_of
from convoy.trust.roster.operator import Handover, make_handover
from convoy.trust.roster.roster import make_roster, open_roster, sign_roster, verify_roster

OLD, NEW, THIRD, MALLORY = (OperatorKey.generate() for _ in range(4))
ALPHA, BETA = Identity.generate(), Identity.generate()
MEMBERS = (
    member_of("alpha", ALPHA, ("127.0.0.1", 7001), head=True),
    member_of("beta", BETA, ("127.0.0.1", 7002)),
)
ROSTER = make_roster("home", MEMBERS)
DAY = datetime.timedelta(days=1)


def at(epoch: int) -> Roster:
    return replace(ROSTER, epoch=epoch)


def start(folder: Path, signed: bytes, key: OperatorKey = OLD) -> OpenedRoster:
    """Start a process of alpha with this roster file."""
    return open_membership("alpha", ALPHA, signed, operator_key=key.public_key, file=AcceptedFile(folder))


def handed(epoch: int, *, cluster: str = "home", old: OperatorKey = OLD, new: OperatorKey = NEW) -> Handover:
    return make_handover(cluster, epoch, old, new)


def test_a_restart_with_an_older_file_uses_the_accepted_roster_and_says_so(tmp_path: Path) -> None:
    first = start(tmp_path, sign_roster(at(1), OLD))
    assert first.notes == ()
    first.membership.offer(sign_roster(at(4), OLD), "beta")
    again = start(tmp_path, sign_roster(at(1), OLD))
    assert again.membership.roster.epoch == 4
    assert again.notes == ("roster epoch 4 counts, which came later than epoch 1 of the file",)
    with pytest.raises(RosterError, match="roster epoch 3, and this member accepted epoch 4"):
        again.membership.offer(sign_roster(at(3), OLD), "beta")


def test_a_restart_with_a_newer_file_uses_that_and_remembers_it(tmp_path: Path) -> None:
    start(tmp_path, sign_roster(at(1), OLD))
    assert start(tmp_path, sign_roster(at(2), OLD)).membership.roster.epoch == 2
    assert start(tmp_path, sign_roster(at(1), OLD)).membership.roster.epoch == 2


def test_a_restart_with_another_roster_of_the_same_epoch_is_a_loud_error(tmp_path: Path) -> None:
    start(tmp_path, sign_roster(at(2), OLD))
    other = replace(at(2), expires=ROSTER.expires + DAY)
    with pytest.raises(RosterError, match="another roster of epoch 2 than the one accepted before"):
        start(tmp_path, sign_roster(other, OLD))


def test_s9_a_restart_with_the_roster_of_another_cluster_is_refused(tmp_path: Path) -> None:
    start(tmp_path, sign_roster(at(2), OLD))
    foreign = replace(at(9), cluster_id="away")
    with pytest.raises(RosterError, match="of cluster away, and this identity is of home"):
        start(tmp_path, sign_roster(foreign, OLD))


def test_s9_a_start_with_an_expired_roster_is_refused(tmp_path: Path) -> None:
    expired = replace(at(1), not_before=ROSTER.not_before - 60 * DAY, expires=ROSTER.expires - 60 * DAY)
    with pytest.raises(RosterError, match="expired"):
        start(tmp_path, sign_roster(expired, OLD))


def test_s7_a_key_that_a_roster_pins_changes_only_with_a_newer_roster_and_the_old_one_cannot_come_back(
    tmp_path: Path,
) -> None:
    fresh = Identity.generate()
    changed = (MEMBERS[0], member_of("beta", fresh, MEMBERS[1].address))
    membership = start(tmp_path, sign_roster(at(2), OLD)).membership
    for epoch in (1, 2):  # no other key under the same or an older epoch, whichever roster lists it
        with pytest.raises(RosterError):
            membership.offer(sign_roster(replace(at(epoch), members=changed), OLD), "beta")
        assert membership.roster.member("beta").identity_key == BETA.public_key
    assert membership.offer(sign_roster(replace(at(3), members=changed), OLD), "beta")
    assert membership.roster.member("beta").identity_key == fresh.public_key
    with pytest.raises(RosterError):
        membership.offer(sign_roster(at(2), OLD), "beta")


def test_a_handover_signed_by_both_moves_the_trust_and_the_old_operator_is_refused_afterwards(
    tmp_path: Path,
) -> None:
    membership = start(tmp_path, sign_roster(at(1), OLD)).membership
    assert membership.offer(sign_roster(at(2), NEW, [handed(2)]), "beta")
    with pytest.raises(RosterError, match="signed by another operator"):
        membership.offer(sign_roster(at(3), OLD), "beta")
    assert membership.offer(sign_roster(at(3), NEW), "beta")
    again = start(tmp_path, sign_roster(at(9), OLD))  # after a restart too, with the old key in convoy.toml
    assert again.membership.roster.epoch == 3
    assert "refused: the roster is signed by another operator" in again.notes[0]
    assert again.membership.offer(sign_roster(at(4), NEW), "beta")


def test_convoy_toml_may_name_the_new_key_once_it_is_trusted(tmp_path: Path) -> None:
    start(tmp_path, sign_roster(at(1), OLD)).membership.offer(sign_roster(at(2), NEW, [handed(2)]), "beta")
    assert start(tmp_path, sign_roster(at(2), NEW, [handed(2)]), NEW).membership.roster.epoch == 2
    with pytest.raises(ConfigError, match="this identity accepted rosters of"):
        start(tmp_path, sign_roster(at(3), MALLORY), MALLORY)


def test_a_member_walks_over_several_handovers_from_the_key_that_it_trusts() -> None:
    steps = [handed(2), handed(5, old=NEW, new=THIRD)]
    signed = open_roster(sign_roster(at(5), THIRD, steps), operator_key=OLD.public_key)
    assert signed.operator == THIRD.public_key
    assert signed.handovers == tuple(steps)
    assert open_roster(sign_roster(at(5), THIRD, steps), operator_key=NEW.public_key).roster == at(5)


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([], "another operator"),
        ([handed(5, old=NEW, new=THIRD)], "another operator"),
        ([handed(2, cluster="away"), handed(5, old=NEW, new=THIRD)], "of cluster away"),
        ([handed(5), handed(2, old=NEW, new=THIRD)], "for epoch 2, expected 6 to 5"),
        ([handed(2), handed(6, old=NEW, new=THIRD)], "for epoch 6, expected 3 to 5"),
        ([replace(handed(2), by_new=b"x" * 64), handed(5, old=NEW, new=THIRD)], "is not signed by"),
        ([replace(handed(2), by_old=b"x" * 64), handed(5, old=NEW, new=THIRD)], "is not signed by"),
        ([replace(handed(2), epoch=3), handed(5, old=NEW, new=THIRD)], "is not signed by"),
    ],
)
def test_a_chain_that_does_not_hold_leads_nowhere(steps: list[Handover], named: str) -> None:
    with pytest.raises(RosterError, match=named):
        open_roster(sign_roster(at(5), THIRD, steps), operator_key=OLD.public_key)


def test_the_new_key_alone_cannot_take_over() -> None:
    text = make_handover("home", 2, MALLORY, NEW)
    forged = replace(text, old=OLD.public_key)
    with pytest.raises(RosterError, match="is not signed by"):
        open_roster(sign_roster(at(2), NEW, [forged]), operator_key=OLD.public_key)


def test_a_circle_of_handovers_ends() -> None:
    circle = [handed(2), handed(3, old=NEW, new=OLD)]
    with pytest.raises(RosterError, match="another operator"):
        open_roster(sign_roster(at(5), THIRD, circle * 3), operator_key=OLD.public_key)


def test_the_tail_of_a_roster_is_bounded_before_it_is_parsed() -> None:
    signed = sign_roster(at(1), OLD) + b"# " + b"x" * 20_000
    with pytest.raises(RosterError, match=r"signature has .* bytes, and the limit is 16384"):
        verify_roster(signed, operator_key=OLD.public_key)
    with pytest.raises(RosterError, match="the handovers are not a list of at most 32"):
        verify_roster(sign_roster(at(1), OLD) + b"handovers = 3\n", operator_key=OLD.public_key)


def test_what_was_accepted_is_private_and_replaced_as_a_whole(tmp_path: Path) -> None:
    membership = start(tmp_path, sign_roster(at(1), OLD)).membership
    file = AcceptedFile(tmp_path)
    for epoch in (2, 3):
        membership.offer(sign_roster(at(epoch), OLD), "beta")
        assert [path.name for path in file.path.parent.iterdir()] == ["newest"]
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    stored = file.load()
    assert stored is not None
    assert verify_roster(stored.signed, operator_key=OLD.public_key).roster.epoch == 3


def test_a_crash_while_writing_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = start(tmp_path, sign_roster(at(1), OLD)).membership

    def crash(_self: Path, _target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", crash)
        with pytest.raises(IdentityError, match=r"cannot write .*: no space left"):
            membership.offer(sign_roster(at(2), OLD), "beta")
    assert membership.roster.epoch == 1  # what cannot be remembered is not adopted
    assert start(tmp_path, sign_roster(at(1), OLD)).membership.roster.epoch == 1


@pytest.mark.parametrize("change", ["garbage", "others may write"])
def test_a_file_that_somebody_touched_is_named_and_not_passed_over(change: str, tmp_path: Path) -> None:
    start(tmp_path, sign_roster(at(1), OLD))
    path = AcceptedFile(tmp_path).path
    if change == "garbage":
        path.write_bytes(b"nothing of ours")
    else:
        path.chmod(0o666)
    with pytest.raises(IdentityError, match="newest"):
        start(tmp_path, sign_roster(at(2), OLD))


def test_a_roster_in_the_store_that_was_changed_does_not_verify(tmp_path: Path) -> None:
    start(tmp_path, sign_roster(at(1), OLD))
    path = AcceptedFile(tmp_path).path
    path.write_bytes(path.read_bytes().replace(b"epoch = 1\n", b"epoch = 2\n"))
    with pytest.raises(RosterError, match="changed after it was signed"):
        start(tmp_path, sign_roster(at(1), OLD))


def test_without_a_store_nothing_is_written(tmp_path: Path) -> None:
    opened = open_membership("alpha", ALPHA, sign_roster(at(1), OLD), operator_key=OLD.public_key)
    assert isinstance(opened.membership, Membership)
    authority = OperatorAuthority(OLD.public_key)
    authority.accept(sign_roster(at(2), NEW, [handed(2)]), at(2), "a test")
    assert authority.trusted == NEW.public_key
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ((b"\nepoch = 2\nold", b"\nepoch = 2\nmore = 1\nold"), "a handover has the unknown field 'more'"),
        ((b"\nepoch = 2\nold", b"\nold"), "a handover has no epoch"),
        ((b"\nepoch = 2\nold", b"\nepoch = 0\nold"), "a handover is for epoch 0"),
        ((b'\nold = "', b'\nold = "zz'), "the keys of a handover are not hex"),
        ((b'\nold = "', b'\nold = "00'), "another length than 32 bytes"),
    ],
)
def test_a_malformed_handover_is_refused_by_its_field(change: tuple[bytes, bytes], named: str) -> None:
    signed = sign_roster(at(2), NEW, [handed(2)])
    assert change[0] in signed
    with pytest.raises(RosterError, match=named):
        verify_roster(signed.replace(*change), operator_key=OLD.public_key)


@pytest.mark.parametrize("how", ["stripped", "padded", "reordered"])
def test_who_passes_a_roster_on_cannot_change_its_handovers(how: str) -> None:
    """Otherwise members that adopted the changed copy could not lead one that slept to the new operator."""
    steps = [handed(2), handed(3, old=NEW, new=THIRD)]
    signed = sign_roster(at(4), THIRD, steps)
    first, second = (part.start() for part in re.finditer(rb"\n\[\[signature.handovers\]\]", signed))
    changed = {
        "stripped": signed[:first],
        "padded": signed + signed[first:second],
        "reordered": signed[:first] + signed[second:] + signed[first:second],
    }[how]
    knows_them_all = OperatorAuthority(THIRD.public_key)
    assert knows_them_all.verify(signed) == at(4)
    with pytest.raises(RosterError, match="changed after it was signed"):
        knows_them_all.verify(changed)


def test_an_operator_cannot_sign_more_handovers_than_members_read() -> None:
    with pytest.raises(RosterError, match="33 handovers led to this operator"):
        sign_roster(at(40), NEW, [handed(epoch) for epoch in range(2, 35)])
