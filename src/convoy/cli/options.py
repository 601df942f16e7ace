"""From ``convoy.toml`` to the options of the rooms: composed here once, frozen from then on."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from convoy.cli.config import Config
from convoy.cli.files import read_bytes

if TYPE_CHECKING:
    from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
    from convoy.serve.options import ServeOptions
    from convoy.transport.member import LocalMember


def member_options(config: Config) -> MemberOptions:
    """What this machine gives, from [model]."""
    from convoy.cluster.options import MemberOptions

    return MemberOptions(
        memory_bytes=int(config.model.memory_gb * 10**9),
        num_threads=config.model.num_threads,
        kernel=config.model.kernel,
        activation_dtype=config.model.activation_dtype,
    )


def peer_options(config: Config, *, exit_with_head: bool = False) -> PeerOptions:
    """A peer's part, from [model]."""
    from convoy.cluster.options import PeerOptions

    return PeerOptions(
        member=member_options(config), model_path=config.model.path, exit_with_head=exit_with_head
    )


def head_options(config: Config) -> HeadOptions:
    """What the head asks of the cluster, from [model], [engine], [plan] and [serve] max_waiting."""
    from convoy.cluster.options import HeadOptions

    return HeadOptions(
        member=member_options(config),
        spans=config.plan.layers,
        wait_s=config.plan.wait_s,
        block_size=config.engine.block_size,
        num_blocks=config.engine.num_blocks,
        max_batch=config.engine.max_batch,
        max_step_tokens=config.engine.max_step_tokens,
        prefill_chunk=config.engine.prefill_chunk,
        max_waiting=config.serve.max_waiting,
    )


def serve_options(config: Config) -> ServeOptions:
    """The HTTP server, from [serve]. Raises ConfigError for one that should not be started."""
    from convoy.serve.options import ServeOptions

    options = ServeOptions(
        host=config.serve.host,
        port=config.serve.port,
        api_key=config.api_key(),
        drain_s=config.serve.drain_s,
    )
    options.check()
    return options


def local_member(config: Config) -> LocalMember:
    """This process as a member, from [cluster]: keys read, roster verified, and the one found in the other.

    Raises ConfigError for what the file lacks, IdentityError and RosterError.
    """
    from convoy.crypto.identity import Identity
    from convoy.transport.member import LocalMember
    from convoy.trust.roster import MAX_ROSTER_BYTES, open_roster

    name = config.require_name()
    data = read_bytes(config.require_roster(), max_bytes=MAX_ROSTER_BYTES)
    now = datetime.datetime.now(datetime.UTC)
    signed = open_roster(data, operator_key=config.require_operator_key(), now=now)
    return LocalMember(name, Identity.load(config.require_identity()), signed.roster)
