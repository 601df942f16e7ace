"""From settings to the membership and to the options of members, heads and servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.config.files import (
    MAX_PEM_BYTES,
    WHENCE_ROSTER,
    default_cache,
    invitation_folder,
    read_bytes,
    token_folder,
)
from convoy.config.settings import Config
from convoy.config.table import DEFAULT_SPECULATE
from convoy.errors import ConfigError, RosterError

if TYPE_CHECKING:
    from convoy.api.listen.options import PageOptions, ServeOptions
    from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
    from convoy.transport.membership import Membership
    from convoy.trust.evidence.policy import Policy
    from convoy.trust.signed_model import SignedModel

# Told a line for a person.
Note = Callable[[str], None]


def unheard(_text: str) -> None:
    """Drop a line: the `Note` of a caller that wants none."""


def load_member(config: Config, note: Note = unheard) -> Membership:
    """Return this machine's name and keys with the verified roster, or with a newer roster accepted before.

    ``note`` is told of what an operator should know. Raises `ConfigError`, `IdentityError` or `RosterError`.
    """
    from convoy.crypto.identity import Identity
    from convoy.trust.roster.accepted import AcceptedFile
    from convoy.trust.roster.authority import open_membership
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES

    name = config.require_name()
    directory = config.require_identity()
    opened = open_membership(
        name,
        Identity.load(directory),
        read_bytes(config.require_roster(), max_bytes=MAX_ROSTER_BYTES, hint=WHENCE_ROSTER),
        operator_key=config.require_operator_key(),
        file=AcceptedFile(directory),
    )
    for text in opened.notes:
        note(f"note: {text}")
    return opened.membership


def load_head(config: Config, note: Note = unheard) -> Membership:
    """Return `load_member`'s result for a head. Raises `RosterError` if this member may not be the head."""
    me = load_member(config, note)
    if not me.member.head:
        heads = ", ".join(member.name for member in me.roster.members if member.head)
        raise RosterError(
            f"{me.name} may not be the head; the roster allows {heads}",
            hint=f"run `convoy join` on {me.name}, or sign a roster with --head {me.name}",
        )
    return me


def load_policy(file: Path | None) -> Policy:
    """Return the policy of a file, or an empty one for None. Raises `ConfigError`."""
    from convoy.trust.evidence.policy import MAX_POLICY_BYTES, Policy, parse_policy

    if file is None:
        return Policy()
    return parse_policy(read_bytes(file, max_bytes=MAX_POLICY_BYTES + 1), str(file))


def member_options(config: Config) -> MemberOptions:
    from convoy.cluster.options import MemberOptions

    model, signed = config.model, signed_model(config)
    return MemberOptions(
        memory_bytes=int(model.memory_gb * 1e9),
        num_threads=model.num_threads,
        kernel=model.wanted_kernel,
        device=model.device,
        activation_dtype=model.activation_dtype,
        policy=load_policy(config.cluster.policy),
        tpm=config.cluster.tpm,
        cache=model.cache or default_cache(),
        weights_from=model.weights_from,
        hub=model.hub,
        signed=None if signed is None else signed.digest,
    )


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


def peer_options(config: Config, model: str | None, *, exit_with_head: bool) -> PeerOptions:
    """Return the options of a peer. ``model`` is the flag.

    A name that needs no files counts as none, because the head sends such names itself.
    """
    from convoy.cluster.options import PeerOptions
    from convoy.model.checkpoints.source import needs_no_files

    chosen = model or config.model_name()
    path = None if chosen is None or needs_no_files(chosen) else Path(chosen)
    return PeerOptions(
        member=member_options(config),
        model_path=path,
        exit_with_head=exit_with_head,
        standby=config.cluster.standby,
    )


def head_options(config: Config) -> HeadOptions:
    from convoy.cluster.options import HeadOptions

    engine, plan = config.engine, config.plan
    return HeadOptions(
        member=member_options(config),
        spans=plan.layers,
        wait_s=plan.wait_s,
        recover_wait_s=plan.recover_wait_s,
        block_size=engine.block_size,
        kv_dtype=engine.kv_dtype,
        num_blocks=engine.num_blocks,
        max_context=engine.max_model_len,
        max_batch=engine.max_batch,
        max_step_tokens=engine.max_step_tokens,
        prefill_chunk=engine.prefill_chunk,
        prefill_window=engine.prefill_window,
        micro_batches=engine.micro_batches,
        speculate=DEFAULT_SPECULATE if engine.speculate is None else engine.speculate,
        # Without any guesses, forced tokens are not guessed either.
        jump_forward=engine.speculate != 0,
        # An explicit setting allows guesses even where they may change a text.
        guess_inexact=engine.speculate is not None,
        share_across_keys=engine.share_across_keys,
        level_chunks=engine.level_chunks,
        max_waiting=config.serve.max_waiting,
        parallel=plan.parallel,
        ranks=plan.ranks,
    )


def serve_options(config: Config) -> ServeOptions:
    """Return the options of the HTTP server. Raises `ConfigError` for a wrong file."""
    from convoy.api.keys.keys import KeyRing
    from convoy.api.listen.options import ServeOptions

    serve, tls = config.serve, _tls_files(config)
    return ServeOptions(
        host=serve.host,
        port=serve.port,
        keys=None if serve.api_key_file is None else KeyRing.open(serve.api_key_file),
        allow_unauthenticated=serve.allow_unauthenticated,
        allowed_hosts=(*serve.allowed_hosts, *(() if tls is None else _names_of(tls[0]))),
        allowed_origins=serve.allowed_origins,
        tls=tls,
        drain_s=serve.drain_s,
        store_responses=serve.store_responses,
        page=_page_options(config),
    )


def _page_options(config: Config) -> PageOptions:
    from convoy.api.listen.options import PageOptions

    if config.cluster.operator_key is None:
        return PageOptions(tokens=token_folder())
    operator_key = config.require_operator_key().hex()
    return PageOptions(tokens=token_folder(), invitations=invitation_folder(), operator_key=operator_key)


def _tls_files(config: Config) -> tuple[str, str] | None:
    certificate, key = config.serve.tls_certificate, config.serve.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing = "tls_certificate" if certificate is None else "tls_key"
        raise ConfigError(
            f"a TLS listener needs a certificate and its key, and {missing} is missing",
            hint="--tls-certificate FILE and --tls-key FILE go together",
        )
    return str(certificate), str(key)


def _names_of(certificate: str) -> tuple[str, ...]:
    """Return the names in a certificate, because the server answers to them."""
    from convoy.crypto.certificate import certificate_names

    return certificate_names(read_bytes(Path(certificate), max_bytes=MAX_PEM_BYTES))
