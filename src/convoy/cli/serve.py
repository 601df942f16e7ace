"""``convoy serve``: run the head. It reaches the peers, splits the model, and answers the OpenAI API."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli.flags.device import DeviceFlag, computing
from convoy.cli.flags.discovery import DiscoverFlag, with_discover
from convoy.cli.flags.http import warn_in_clear
from convoy.cli.flags.quantize import ComputeFlag, QuantizeFlag
from convoy.cli.flags.steps import with_step_flags
from convoy.cli.flags.traces import TracesFlag, tracing
from convoy.cli.invite import DEFAULT_ENROLMENT_PORT, AutoApproveFlag, InviteAddressFlag
from convoy.cli.local.members import LayersFlag
from convoy.cli.operator.home import DEFAULT_HOME, DirectoryFlag, config_file
from convoy.cli.operator.passphrase import PassphraseFlag
from convoy.cli.running.front import RunServer, front_server, own_key, server_of
from convoy.cli.running.hub import SignedFlag, WeightsFromFlag, open_also, open_model, weights_from
from convoy.cli.running.invite import InviteFlags
from convoy.cli.running.member import load_head, watched_roster
from convoy.cli.running.process import AnnouncedProcess, announced
from convoy.cli.running.provide import CertificateFlag, CoordinatorKeyFlag, ProvideFlag, Providing
from convoy.cli.running.start import settle_memory
from convoy.cli.show.cluster_status import print_cluster
from convoy.cli.show.output import (
    JsonFlag,
    VerboseFlag,
    print_draining,
    print_ended,
    print_json,
    print_note,
)
from convoy.cli.show.progress import StartLines, loading_bars
from convoy.cli.show.ready import ReadyServer, room_tokens
from convoy.config.settings import Config, load_config, override
from convoy.errors import ConfigError, ConvoyError, UsageError
from convoy.model.library import heavy_rooms
from convoy.sdk.endpoint import DEFAULT_URL, dialled_url, head_answers
from convoy.sdk.head import network_of, only_process
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.models import OpenedModel
from convoy.sdk.names import spans_by_name
from convoy.sdk.options import head_options, serve_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from convoy.api.front.supervisor import FrontServer
    from convoy.api.listen.options import ServeOptions
    from convoy.cluster.running import RunningCluster
    from convoy.fleet.provider.run import ProviderBeside
    from convoy.plan.spec.model import ModelSpec
    from convoy.transport.membership import Membership
    from convoy.transport.network import Network

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="demo, a directory, org/name[:QUANT] of the hub, synthetic:NAME.  [default: from --config]"
    ),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option(help="This member's convoy.toml.  [default: that in --dir, or this machine alone]"),
]
InviteFlag = Annotated[
    bool, typer.Option("--invite", help="First let one machine in. Makes keys, roster and config if missing.")
]
InvitePortFlag = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help=f"With --invite: port to listen on.  [default: {DEFAULT_ENROLMENT_PORT}, or any]",
    ),
]


@with_step_flags
def serve(
    *,
    model: ModelArgument = None,
    config: ConfigFlag = None,
    layers: LayersFlag = None,
    listens: dict[str, Any],
    engine: dict[str, Any],
    sharing: dict[str, Any],
    waiting: dict[str, Any],
    invite: InviteFlag = False,
    auto_approve: AutoApproveFlag = False,
    address: InviteAddressFlag = None,
    name: Annotated[str | None, typer.Option(help="With --invite: the first machine's name.")] = None,
    invite_port: InvitePortFlag = None,
    passphrase_file: PassphraseFlag = None,
    directory: DirectoryFlag = DEFAULT_HOME,
    discover: DiscoverFlag = None,
    quantize: QuantizeFlag = None,
    compute: ComputeFlag = None,
    weights: WeightsFromFlag = None,
    signed: SignedFlag = None,
    device: DeviceFlag = None,
    provide: ProvideFlag = None,
    coordinator_key: CoordinatorKeyFlag = None,
    certificate: CertificateFlag = None,
    traces: TracesFlag = None,
    verbose: VerboseFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Run the head: split a model, answer the OpenAI API."""
    asked = InviteFlags(config, directory, auto_approve, address, name, invite_port, passphrase_file)
    config = asked.let_in(model, as_json=as_json) if invite else config_file(config, directory)
    settings = _settings(with_discover(load_config(config), discover), weights, signed, traces)
    if config is not None:
        # A member with another role learns that before a model is looked for.
        load_head(settings)
    chosen = _chosen(settings, model, quiet=as_json)
    http, limits = override(settings.serve, **listens), override(settings.engine, **engine)
    plan = override(settings.plan, **waiting, **sharing)
    settings = computing(override(settings, serve=http, engine=limits, plan=plan), quantize, compute, device)
    providing = Providing.of(provide, coordinator_key, certificate, settings, directory)
    with ExitStack() as stack:
        if config is None:
            settings = _on_this_machine(settings, stack)
        shared = with_layers(_checked(settings, chosen), layers, chosen.source.spec)
        note = _whose(config, directory)
        # A wrong folder would look like a head without peers. With ``verbose`` the note is printed anyhow.
        tells_alone = config is None and not (as_json or verbose)
        on_ready = partial(print_note, note) if tells_alone else _say_nothing
        show = Shown(as_json, verbose, note, folder=_folder(config), on_ready=on_ready)
        serve_cluster(shared, chosen, show, providing=providing)


def _say_nothing() -> None:
    """Print nothing."""


def _folder(config: Path | None) -> Path:
    """Return the folder of the member's files; without any, the present one."""
    return Path() if config is None else config.parent


def _settings(settings: Config, weights: str | None, signed: Path | None, traces: str | None) -> Config:
    source = override(settings.model, weights_from=weights_from(weights), signed=signed)
    return override(settings, model=source, telemetry=override(settings.telemetry, traces=traces))


def _checked(settings: Config, chosen: OpenedModel) -> Config:
    """Return ``settings`` if they are valid. Raise their errors before anything is started."""
    options = head_options(settings)
    options.check()
    options.check_context(chosen.source.spec)
    return settings


def _on_this_machine(settings: Config, stack: ExitStack) -> Config:
    """Return the settings of a cluster of one member that lives as long as ``stack``."""
    local = stack.enter_context(LocalCluster(_alone_options(settings)))
    http, limits = settings.serve, settings.engine
    return override(local.config(local.head), serve=http, engine=limits, telemetry=settings.telemetry)


def _alone_options(settings: Config) -> LocalOptions:
    return LocalOptions(
        num_members=1, kernel=settings.model.wanted_kernel, device=settings.model.device, note=print_note
    )


def _whose(config: Path | None, directory: Path) -> str:
    """Return a note on the cluster that this head serves."""
    if config is not None:
        return f"as the head of {config}; `convoy run` is this machine alone"
    return (
        f"no cluster in {directory.resolve()}: this machine serves alone (--invite makes a cluster; for one "
        "that exists, run this where its .convoy is, or name that folder with --dir)"
    )


def _chosen(settings: Config, model: str | None, *, quiet: bool) -> OpenedModel:
    """Return the named model, with the files that it needs on this machine."""
    named = model or settings.model_name()
    if named is None:
        raise UsageError(
            "no model was named", hint='convoy serve MODEL, or name = "MODEL" under [model] in convoy.toml'
        )
    return open_model(settings, named, quiet=quiet)


def with_layers(settings: Config, layers: list[str] | None, spec: ModelSpec) -> Config:
    """Return ``settings`` with the spans of ``--layers`` in place of those of [plan].

    A bare span is for the head, then for the roster's peers in order. Raises `UsageError`, and the errors of
    `plan.placement.placement.place` for spans that the members cannot hold.
    """
    from convoy.plan.offer import MemberOffer
    from convoy.plan.placement.grouping import names_in
    from convoy.plan.placement.placement import place

    if not layers:
        return settings
    me = load_head(settings)
    names = [me.name, *(member.name for member in me.roster.members if member.name != me.name)]
    spans = spans_by_name(layers, names)
    assert spans is not None
    # A member without a span may be a standby, or share the remaining layers. So try both.
    groups = names, list(dict.fromkeys([me.name, *names_in(spans)]))
    failed: ConvoyError | None = None
    for group in groups:
        try:
            # The memory of peers is unknown before they answer. This check is for the spans alone.
            place(spec, [MemberOffer(name, 1 << 62, head=name == me.name) for name in group], spans)
            break
        except ConvoyError as error:
            failed = failed or error
    else:
        assert failed is not None
        raise failed
    return override(settings, plan=override(settings.plan, layers=spans))


@dataclass(frozen=True, slots=True)
class Shown:
    """Hold how a start is shown. ``note`` is a line about the cluster for ``verbose``.

    ``verb`` and ``folder`` stand in the list of `convoy ps`. ``on_ready`` is called once the head serves.
    """

    as_json: bool = False
    verbose: bool = False
    note: str | None = None
    verb: str = "serve"
    folder: Path = Path()
    on_ready: Callable[[], None] = lambda: None


def serve_cluster(
    settings: Config,
    model: str | OpenedModel,
    show: Shown,
    *,
    watch: Callable[[], None] | None = None,
    providing: Providing | None = None,
    options: ServeOptions | None = None,
) -> None:
    """Bring the cluster up, serve until a signal, and take it down.

    ``options`` are those of ``settings`` if they were read before: a pipe with keys can be read only once.
    """
    options = options or serve_options(settings)
    options.check()
    if options.in_clear and not show.as_json:
        warn_in_clear(options.host)
    me = load_head(settings)
    # Report a port in use before anything is loaded. Nothing listens until the model is ready.
    check_port(options)
    opened = open_also(settings, model, quiet=show.as_json)
    with (
        only_process(settings),
        watched_roster(settings, me, quiet=show.as_json),
        announced(show.verb, me.name, show.folder) as here,
        front_server(settings, options) as front,
    ):
        # The network only finds peers at the start: a serving head looks for no member.
        with _said_when_interrupted(quiet=show.as_json), network_of(settings) as network:
            cluster = start_cluster(
                settings,
                opened,
                me=me,
                quiet=show.as_json,
                verbose=show.verbose,
                watch=watch,
                network=network,
                # `watch` already reports a local process that does not come.
                keep_waiting=watch is None,
            )
        with tracing(settings.telemetry.traces, "convoy-head") as on:

            def on_change(loaded: str | None, line: str) -> None:
                here.say(f"serves {loaded or 'no model now'} at {here.url}/v1")
                if not show.as_json:
                    print_note(line)

            traced = replace(options, traces=on)
            run = server_of(front, cluster, traced, settings, opened.known(), on_change)
            _serve(cluster, run, traced, settings, show, providing, here, front)


def check_port(options: ServeOptions) -> None:
    """Raise ConfigError if HTTP cannot be served there. Say so where a head of Convoy already serves."""
    from convoy.api.server import bind

    try:
        bind(options).close()
    except ConfigError as error:
        if not head_answers(options.host, options.port):
            raise
        raise ConfigError(
            f"{error.message} by a head of Convoy, which runs already",
            hint=f"`convoy status --url {dialled_url(options.host, options.port)}` shows it; stop it first. "
            "The head of another cluster needs another --port",
        ) from error.__cause__


@contextmanager
def _said_when_interrupted(*, quiet: bool) -> Iterator[None]:
    """Report that the command ended if the start is interrupted. A start may take minutes."""
    try:
        yield
    except KeyboardInterrupt:
        if not quiet:
            print_note("ended: while starting; nothing was served")
        raise


def _serve(
    cluster: RunningCluster,
    run: RunServer,
    options: ServeOptions,
    settings: Config,
    show: Shown,
    providing: Providing | None,
    here: AnnouncedProcess,
    front: FrontServer | None,
) -> None:
    beside: list[ProviderBeside] = []
    try:

        def on_ready(url: str) -> None:
            settle_memory()
            _say_ready(cluster, url, settings, show)
            here.ready(f"serves {cluster.status().model} at {url}/v1", url)
            show.on_ready()
            if providing is not None:
                key = own_key(front, options, "provider")
                beside.append(providing.begin(url, cluster.head, options, key, quiet=show.as_json))

        def on_stop() -> None:
            # The coordinator's requests end before the head does.
            for provider in beside:
                provider.drain(options.drain_s)

        def on_drain(num_answers: int, drain_s: float) -> None:
            if not show.as_json:
                print_draining(num_answers, drain_s)

        num_cut = run(on_ready=on_ready, on_stop=on_stop, on_drain=on_drain)
    finally:
        cluster.close()
    if not show.as_json:
        print_ended(num_cut)


def _say_ready(cluster: RunningCluster, url: str, settings: Config, show: Shown) -> None:
    if show.as_json:
        print_json({"url": f"{url}/v1", "status": cluster.status()})
        return
    if show.verbose:
        print_cluster(cluster.status())
        # The lines below go to another stream, and come after the table.
        sys.stdout.flush()
        if show.note is not None:
            print_note(show.note)
    from convoy.config.clear_text import is_loopback

    active = cluster.head.active_plan
    assert active is not None
    ready = ReadyServer(
        settings.serve.served_model_name or active.plan.model,
        [name for stage in active.plan.stages for name in stage.holders],
        active.max_context,
        room_tokens(active),
        url,
        DEFAULT_URL,
        settings.serve.api_key_file,
        settings.serve.tls_certificate,
        has_page=settings.serve.tls_certificate is not None or is_loopback(settings.serve.host),
    )
    for line in ready.lines():
        print_note(line)


def start_cluster(
    settings: Config,
    model: str | OpenedModel,
    *,
    quiet: bool,
    verbose: bool = False,
    me: Membership | None = None,
    watch: Callable[[], None] | None = None,
    network: Network | None = None,
    keep_waiting: bool = False,
) -> RunningCluster:
    """Return a running cluster, after a token has passed every stage.

    ``me`` is the head's membership if it is loaded already. See `Head` for ``watch``, and
    `cluster.options.HeadOptions` for ``keep_waiting``. Members that this command started itself need no
    word of their arrival, unless it is ``verbose``.
    """
    tells_arrivals = not quiet and (verbose or watch is None)
    with heavy_rooms(lambda text: None if quiet else print_note(text)):
        # A stage needs this import soon, and peers start meanwhile.
        import convoy.model.loading.load  # noqa: F401
        from convoy.cluster.running import RunningCluster
    from convoy.model.checkpoints.source import ModelSource

    me = me or load_head(settings)
    opened = OpenedModel(ModelSource.resolve(model)) if isinstance(model, str) else model
    peers = [member.name for member in me.roster.members if member.name != me.name]
    if peers and tells_arrivals:
        # Only `serve` has this option, and its members are not started here.
        flag = " (--wait)" if watch is None else ""
        print_note(f"waiting for {', '.join(peers)}, at most {settings.plan.wait_s:g} s{flag}")
    with loading_bars(quiet=quiet) as on_load:
        cluster = RunningCluster.start(
            me,
            opened.source,
            replace(head_options(settings), keep_waiting=keep_waiting),
            on_load,
            network=network,
            watch=watch,
            on_arrival=_say_arrival if tells_arrivals else None,
            on_start=StartLines().on_start if tells_arrivals else None,
            own=opened.own,
        )
    _say_why_not_exact(settings, cluster, verbose=verbose)
    for name, verdict in cluster.head.verifier.excluded.items():
        print_note(f"{name} gets no stage: it has level {verdict.level.text}; {verdict.why}")
    return cluster


def _say_arrival(name: str, missing: list[str], left_s: float) -> None:
    others = f"; waiting for {', '.join(missing)}, at most {left_s:.0f} s" if missing else ""
    print_note(f"{name} is here{others}")


def _say_why_not_exact(settings: Config, cluster: RunningCluster, *, verbose: bool) -> None:
    from convoy.config.kernels import EXACT, on_device
    from convoy.model.backends.host.checks.selfcheck import why_not_exact

    active = cluster.head.active_plan
    assert active is not None
    if any(map(on_device, {active.plan.kernel, *active.plan.kernels})):
        if verbose:
            print_note("stages on CUDA or MLX round, so a split equals the whole to their rounding only")
    elif active.plan.kernel != EXACT and settings.model.kernel == "auto":
        here = why_not_exact(settings.model.num_threads) or "another member refuses it"
        print_note(f"not in exact mode, so a split equals the whole to rounding only: {here}")
