"""The surroundings of a serving head: its network, its view of the roster file, and its HTTP service."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from convoy.config.files import read_bytes
from convoy.config.settings import Config
from convoy.config.table import SERVE, ServeConfig
from convoy.errors import ConfigError, ConvoyError
from convoy.sdk.options import Note

if TYPE_CHECKING:
    from convoy.api.model_switch import OnChange
    from convoy.api.service import Service
    from convoy.cluster.model_loader import KnownModel
    from convoy.cluster.running import RunningCluster
    from convoy.cluster.status import ClusterStatus
    from convoy.sdk.pull import ModelPuller
    from convoy.transport.membership import Membership
    from convoy.transport.network import Network


@contextmanager
def network_of(config: Config) -> Iterator[Network | None]:
    """Yield the network to use; None is the standard one. Raises `ConfigError` without the extra."""
    if not config.listen.discover:
        yield None
        return
    from convoy.cluster.discovery import DiscoveredNetwork

    network = DiscoveredNetwork()
    try:
        yield network
    finally:
        network.close()


@contextmanager
def only_process(config: Config) -> Iterator[None]:
    """Hold the folder of this member's keys while the block runs.

    A member is one process. Peers take a second one for the same member that came back, and leave the first.
    Raises ConfigError if another process holds the folder.
    """
    directory = config.require_identity()
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{config.require_name()} runs already on this machine, with the keys in {directory}",
                hint="stop that process first; another member of this machine needs keys of its own",
            ) from error
        except OSError:
            # A file system without locks. The check is lost there, and nothing else.
            pass
        yield
    finally:
        os.close(descriptor)


@contextmanager
def watched_roster(config: Config, me: Membership, note: Note) -> Iterator[None]:
    """Watch the roster file while the block runs, and tell ``note`` of its changes."""
    from convoy.cluster.roster_watch import RosterWatch

    end = me.subscribe(lambda roster: note(f"roster: epoch {roster.epoch} counts now"))
    watch = RosterWatch(config.require_roster(), me, note, judged=_older(config, me))
    try:
        yield
    finally:
        watch.close()
        end()


def _older(config: Config, me: Membership) -> bytes | None:
    """Return the roster file's bytes if an epoch accepted before counts in its place. `load_member` reported
    that.
    """
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES, verify_roster

    try:
        signed = read_bytes(config.require_roster(), max_bytes=MAX_ROSTER_BYTES)
        older = verify_roster(signed, operator_key=config.require_operator_key()).roster
    except ConvoyError:
        return None
    return signed if older.cluster_id == me.roster.cluster_id and older.epoch < me.roster.epoch else None


def service_of(
    cluster: RunningCluster,
    serve: ServeConfig = SERVE,
    also: Sequence[KnownModel] = (),
    *,
    keeps_model: bool = False,
    puller: ModelPuller | None = None,
    on_change: OnChange = lambda _loaded, _line: None,
) -> Service:
    """Return the service of a cluster's model over HTTP, with the cluster's health, status and metrics.

    ``serve`` may name the model in every API. ``also`` are further models that requests may name. With
    ``keeps_model`` nothing unloads the model, and the status lists no models to load and unload. ``puller``
    pulls models for operators. ``on_change``: see `SwitchOptions`.
    """
    from convoy.api.model_switch import ModelSwitch, SwitchOptions
    from convoy.api.service import ServedModel, Service
    from convoy.cluster.metrics.member import head_families
    from convoy.cluster.model_loader import KnownModel, LoadedEngine, ModelLoader

    active = cluster.head.active_plan
    assert active is not None
    name = serve.served_model_name or active.plan.model
    first = KnownModel(name, cluster.source, cluster.tokenizer, cluster.head.own_weights)
    loader = ModelLoader(cluster, [first, *also])
    served = tuple(
        ServedModel(model.name, LoadedEngine(loader, model), model.tokenizer) for model in (first, *also)
    )
    of_cluster = partial(cluster.status, foresees=True) if keeps_model else loader.status

    def status(*, measures: bool = True) -> ClusterStatus:
        pull = None if puller is None else puller.report()
        return msgspec.structs.replace(of_cluster(measures=measures), pull=pull)

    kept_s = serve.keep_alive_s
    options = SwitchOptions(
        serve.max_waiting, serve.model_wait_s, kept_s, knows_several=bool(also), on_change=on_change
    )
    return Service(
        served,
        cluster.health,
        status,
        cluster.level,
        (lambda: head_families(cluster, loader.named),),
        None if keeps_model else ModelSwitch(loader, options),
        partial(status, measures=False),
        puller,
    )
