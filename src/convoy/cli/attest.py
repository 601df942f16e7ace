"""``convoy attest``: show the evidence of this machine, and enrol its TPM in the roster."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.audit import operator_log, roster_subject
from convoy.cli.operator.home import config_file, roster_file
from convoy.cli.operator.passphrase import PassphraseFlag
from convoy.cli.operator.roster_change import OPERATOR_DIRECTORY, load_operator, require_signer
from convoy.cli.running.member import load_member
from convoy.cli.show.output import JsonFlag, print_fields, print_json, print_note
from convoy.config.files import MAX_PEM_BYTES, read_bytes, read_text, replace_file
from convoy.config.settings import Config, load_config
from convoy.errors import AttestationError, UsageError
from convoy.sdk.options import load_policy, member_options

if TYPE_CHECKING:
    from convoy.cluster.attestation.tpm import Tpm
    from convoy.crypto.identity import OperatorKey
    from convoy.trust.evidence.policy import Policy
    from convoy.trust.roster.roster import SignedRoster

app = typer.Typer(help="Show this machine's evidence; enrol its TPM.", rich_markup_mode=None)

ConfigFlag = Annotated[
    Path | None, typer.Option(help="This member's convoy.toml.  [default: .convoy/convoy.toml]")
]
OutFlag = Annotated[Path | None, typer.Option(help="The file to write.  [default: named after the member]")]
RosterFlag = Annotated[
    Path | None, typer.Option(help="The roster file.  [default: roster.toml, or else .convoy/roster.toml]")
]
OperatorFlag = Annotated[Path, typer.Option(help="Directory of the operator's key.")]
PolicyFlag = Annotated[Path | None, typer.Option(help="A policy file.  [default: the config's]")]


@app.command()
def new(
    config: ConfigFlag = None,
    algorithm: Annotated[str, typer.Option(help="ecc (P-256) or rsa (2048).")] = "ecc",
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Make this machine's TPM keys and a request. Send the request to the operator."""
    from convoy.trust.evidence.activation import Request, request_to_text

    settings = _settings(config)
    me = load_member(settings).current
    keys = _tpm(settings).keys(algorithm)
    request = Request(
        me.name, me.identity.public_key, keys.certificate, keys.endorsement, keys.attestation
    ).signed(me.identity.sign)
    out = out or Path(f"{me.name}.request.toml")
    replace_file(out, request_to_text(request).encode())
    _print({"member": me.name, "request": out}, f"convoy attest challenge {out} --policy FILE", as_json)


@app.command()
def challenge(
    request: Annotated[Path, typer.Argument(help="The member's request.")],
    policy: Annotated[Path, typer.Option(help="The policy file with [attestation.tpm] authorities.")],
    roster: RosterFlag = None,
    operator: OperatorFlag = OPERATOR_DIRECTORY,
    passphrase_file: PassphraseFlag = None,
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer a request with a challenge, as operator. Checks the TPM's certificate first."""
    from convoy.crypto.keyfile import write_private
    from convoy.trust.evidence.activation import (
        MAX_FILE_BYTES,
        challenge_for,
        challenge_to_text,
        check_request,
        pending_to_text,
        request_from_text,
    )

    asked = request_from_text(read_text(request, max_bytes=MAX_FILE_BYTES))
    listed = _open_roster(roster_file(roster), operator, passphrase_file)[0].roster
    member = listed.member(asked.member)
    authority = check_request(asked, member, _authorities(load_policy(policy), policy.parent))
    made, pending = challenge_for(asked)
    kept = _pending_file(operator, member.name)
    with contextlib.suppress(FileNotFoundError):
        # The file of an earlier challenge goes: only the newest challenge can be answered.
        kept.unlink()
    write_private(kept, pending_to_text(pending).encode())
    out = out or Path(f"{member.name}.challenge.toml")
    replace_file(out, challenge_to_text(made).encode())
    facts = {"member": member.name, "authority": authority, "challenge": out, "kept": kept}
    _print(facts, f"convoy attest answer {out} --config FILE", as_json)


@app.command()
def answer(
    challenge_file: Annotated[Path, typer.Argument(metavar="CHALLENGE", help="The operator's challenge.")],
    config: ConfigFlag = None,
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Let this machine's TPM open the credential of a challenge."""
    from convoy.trust.evidence.activation import (
        MAX_FILE_BYTES,
        answer_for,
        answer_to_text,
        challenge_from_text,
    )

    settings = _settings(config)
    me = load_member(settings).current
    asked = challenge_from_text(read_text(challenge_file, max_bytes=MAX_FILE_BYTES))
    if asked.member != me.name:
        raise AttestationError(
            f"the challenge is for {asked.member[:63]!r}, and this is {me.name}",
            hint="answer it on that machine, or name its convoy.toml with --config",
        )
    tpm = _tpm(settings)
    secret = tpm.activate(asked.algorithm, asked.id_object, asked.encrypted_secret)
    given = answer_for(me.name, me.identity.public_key, tpm.attestation_public(asked.algorithm), secret)
    out = out or Path(f"{me.name}.answer.toml")
    replace_file(out, answer_to_text(given).encode())
    _print({"member": me.name, "answer": out}, f"convoy attest accept {out}", as_json)


@app.command("accept")
def accept_answer(
    answer_file: Annotated[Path, typer.Argument(metavar="ANSWER", help="The member's answer.")],
    roster: RosterFlag = None,
    operator: OperatorFlag = OPERATOR_DIRECTORY,
    passphrase_file: PassphraseFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Enrol a TPM's key in the roster, as operator. Signs the roster again, one epoch later."""
    from convoy.crypto.keyfile import read_private
    from convoy.trust.evidence.activation import MAX_FILE_BYTES, accept, answer_from_text, pending_from_text
    from convoy.trust.roster.roster import sign_roster, verify_roster

    given = answer_from_text(read_text(answer_file, max_bytes=MAX_FILE_BYTES))
    roster = roster_file(roster)
    opened, key = _open_roster(roster, operator, passphrase_file)
    listed, handovers = opened.roster, opened.handovers
    member = listed.member(given.member)
    kept = _pending_file(operator, member.name)
    enrolled = accept(given, pending_from_text(read_private(kept).decode()), member)
    members = tuple(
        replace(one, attestation_key=enrolled) if one.name == member.name else one for one in listed.members
    )
    newer = replace(listed, epoch=listed.epoch + 1, members=members)
    data = sign_roster(newer, key, handovers)
    subject = roster_subject(verify_roster(data, operator_key=key.public_key), roster)
    with operator_log(operator, key).doing("sign roster", {**subject, "attestation_key_of": member.name}):
        replace_file(roster, data)
    kept.unlink()
    facts = {"member": member.name, "roster": roster, "epoch": listed.epoch + 1}
    if as_json:
        print_json(facts)
        return
    print_fields(facts.items())
    print_note(f"give {roster} to every member; {member.name} can prove its machine from then on")


@app.command()
def show(
    config: ConfigFlag = None,
    policy: PolicyFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show this machine's evidence, and a policy's verdict on it."""
    from convoy.cluster.attestation.exchange import Attestation

    settings = _settings(config)
    me = load_member(settings).current
    demands = load_policy(policy or settings.cluster.policy)
    options = replace(member_options(settings), policy=demands)
    attestation = Attestation.of(lambda: me, options, lambda _link, _verdict: None)
    verdict = attestation.check_self()
    claims = attestation.evidence_maker.claims
    facts: dict[str, object] = {
        "member": me.name,
        "level": verdict.level.text,
        "minimum": demands.minimum.text,
        "suffices": attestation.suffices(verdict),
        "package": claims.package,
        **claims.versions,
        "platform": claims.platform,
    }
    if as_json:
        print_json({**facts, "reasons": verdict.reasons, "hardware": verdict.facts})
        return
    print_fields([*facts.items(), *verdict.facts.items()])
    for reason in verdict.reasons:
        print_note(reason)


def _settings(config: Path | None) -> Config:
    file = config_file(config)
    if file is None:
        raise UsageError("no convoy.toml is named", hint="name this member's with --config")
    return load_config(file)


def _tpm(settings: Config) -> Tpm:
    from convoy.cluster.attestation.tpm import Tpm

    if settings.cluster.tpm is None:
        raise UsageError(
            f"{settings.path}: [cluster] names no tpm", hint='add tpm = "device:/dev/tpmrm0" to it'
        )
    return Tpm(settings.cluster.tpm)


def _open_roster(
    roster: Path, operator: Path, passphrase_file: Path | None
) -> tuple[SignedRoster, OperatorKey]:
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES, open_roster

    key = load_operator(operator, passphrase_file)
    data = read_bytes(roster, max_bytes=MAX_ROSTER_BYTES)
    signed = open_roster(data, operator_key=key.public_key)
    require_signer(signed, key)
    return signed, key


def _authorities(policy: Policy, folder: Path) -> list[bytes]:
    from convoy.crypto.tpm.endorsement import read_authorities

    found: list[bytes] = []
    for name in policy.authorities:
        pem = read_bytes(folder / name, max_bytes=MAX_PEM_BYTES)
        found += read_authorities(pem, str(folder / name))
    return found


def _pending_file(operator: Path, member: str) -> Path:
    return operator / f"attest-{member}.toml"


def _print(facts: dict[str, object], then: str, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    print_fields(facts.items())
    print_note(f"next: {then}")
