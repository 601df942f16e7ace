"""Start a model from Python: its members, its engine in this process, and its HTTP server."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from convoy.config.kernels import computing_kernel
from convoy.config.settings import Config, load_config, override
from convoy.config.table import ServeConfig
from convoy.errors import ConvoyError, UsageError
from convoy.sdk.client import Client
from convoy.sdk.head import network_of, only_process, service_of, watched_roster
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.models import OpenedModel, local_model, open_model, with_also
from convoy.sdk.options import head_options, load_head, serve_options, unheard

if TYPE_CHECKING:
    from convoy.api.listen.options import ServeOptions
    from convoy.api.server import Stop
    from convoy.api.service import Service
    from convoy.cluster.running import RunningCluster
    from convoy.engine.sessions.session import Session
    from convoy.model.sampling.params import SamplingParams
    from convoy.model.text.tokens import Tokenizer

# Of `serve`: members, layers, kernel, compute, device, num_threads and engine.
_LOCAL_DEFAULTS = (1, None, "auto", "exact", "auto", None, None)


class Server(Client):
    """Own a running model: a client of its HTTP server at ``url``, with sessions beside. `serve` makes it.

    Leaving a `with`, or `close`, ends the server and every process that `serve` started.
    """

    def __init__(
        self,
        cluster: RunningCluster,
        url: str,
        stack: ExitStack,
        *,
        key: str | None = None,
        ca: str | Path | None = None,
    ) -> None:
        """Hold a started cluster. ``stack`` ends all that was started, in order."""
        super().__init__(url, key=key, ca=ca)
        self._cluster = cluster
        self._stack = stack

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer: text to token ids and back."""
        return self._cluster.tokenizer

    def session(
        self,
        params: SamplingParams | None = None,
        *,
        salt: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Session:
        """Return a timeline of tokens with its K/V on the stages; see `Session`.

        ``params`` are its default sampling parameters; None is greedy.
        """
        return self._cluster.session(params, salt=salt, timeout_s=timeout_s)

    def close(self) -> None:
        """Let running answers end for at most ``[serve] drain_s``, then end everything; also twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The stack hears of an error, so that nothing is drained after Ctrl-C.
        self._stack.__exit__(kind, error, trace)


def serve(
    model: str | None = None,
    *,
    members: int = 1,
    config: str | Path | None = None,
    layers: Sequence[str] | None = None,
    kernel: str = "auto",
    compute: str = "exact",
    device: str = "auto",
    num_threads: int | None = None,
    engine: Mapping[str, int | str] | None = None,
    port: int | None = None,
    key: str | None = None,
    ca: str | Path | None = None,
) -> Server:
    """Start ``model`` on this machine and return its server, after a token has passed every stage.

    Without ``config``, ``members`` processes here share the model: this one is the head, and the others end
    with it. ``layers``, ``kernel``, ``compute``, ``device`` and ``num_threads`` are those of ``convoy run``,
    ``engine`` has keys of [engine], and without ``port`` any free one is taken.

    With ``config``, a convoy.toml, this process is the head of that cluster: its peers run ``convoy join``,
    and the file decides all but ``model`` and ``port``. ``key`` and ``ca`` are those of `connect`, for the
    server's own requests where the file demands an API key or has a certificate.

    Use the result in a `with`, or call its ``close``. If the start fails or is interrupted, nothing that was
    started remains. Raises `ConvoyError`.
    """
    with ExitStack() as stack:
        # Large imports freeze all objects (`model.library.collector_at_rest`). Objects that are still frozen
        # when the interpreter exits are never collected, and Triton's modules report them as leaks.
        stack.callback(gc.unfreeze)
        local: LocalCluster | None = None
        if config is None:
            asked = LocalOptions(
                *(members, layers, computing_kernel(kernel, compute), num_threads),
                engine=dict(engine or {}),
                device=device,
            )
            opened, named = _open_local(model, asked)
            local = stack.enter_context(LocalCluster(asked))
            local.start_peers(named)
            settings = override(local.config(local.head), serve=ServeConfig(port=port or 0))
        else:
            if (members, layers, kernel, compute, device, num_threads, engine) != _LOCAL_DEFAULTS:
                raise UsageError(
                    "config came with options of local members, expected one or the other",
                    hint="set them in the file, or leave config out",
                )
            settings, opened = _open_configured(model, Path(config), port)
        try:
            options = serve_options(settings)
            cluster = _start(settings, opened, options, stack, None if local is None else local.check_alive)
            url = stack.enter_context(http_server(_service(cluster, settings, opened), options))
        except ConvoyError as error:
            if local is not None:
                local.reraise(error)
            raise
        owned = ExitStack()
        server = Server(cluster, url, owned, key=key, ca=ca)
        # Only now does the server own all of it. Until here, an error ends it.
        owned.push(stack.pop_all())
        return server


def _service(cluster: RunningCluster, settings: Config, opened: OpenedModel) -> Service:
    from convoy.sdk.pull import ModelPuller

    puller = ModelPuller(cluster.head, settings)
    return service_of(cluster, settings.serve, opened.known(), puller=puller)


def _open_local(model: str | None, options: LocalOptions) -> tuple[OpenedModel, str]:
    """Return the model and its name for the members. Check ``options`` before any process starts."""
    from convoy.model.checkpoints.source import ModelSource

    if model is None:
        raise UsageError("no model is named", hint='for example convoy.serve("demo")')
    named = local_model(Config(), model)
    opened = OpenedModel(ModelSource.resolve(named))
    options.check(opened.source.spec)
    return opened, named


def _open_configured(model: str | None, file: Path, port: int | None) -> tuple[Config, OpenedModel]:
    settings = load_config(file)
    settings = override(settings, serve=override(settings.serve, port=port))
    named = model or settings.model_name()
    if named is None:
        raise UsageError("no model is named", hint="give model, or name it in the file's [model]")
    opened = with_also(settings, open_model(settings, named))
    asked = head_options(settings)
    asked.check()
    asked.check_context(opened.source.spec)
    return settings, opened


def _start(
    settings: Config,
    opened: OpenedModel,
    options: ServeOptions,
    stack: ExitStack,
    watch: Callable[[], None] | None,
) -> RunningCluster:
    """Bring the cluster up. ``stack`` gets all that must end."""
    from convoy.api.server import bind
    from convoy.cluster.running import RunningCluster

    options.check()
    # Report a port in use before anything is loaded. Nothing listens until the model is ready.
    bind(options).close()
    me = load_head(settings)
    stack.enter_context(only_process(settings))
    stack.enter_context(watched_roster(settings, me, unheard))
    # The network only finds peers at the start: a serving head looks for no member.
    with network_of(settings) as network:
        cluster = RunningCluster.start(
            me, opened.source, head_options(settings), network=network, watch=watch, own=opened.own
        )
    stack.callback(cluster.close)
    return cluster


@contextmanager
def http_server(service: Service, options: ServeOptions) -> Iterator[str]:
    """Serve on a thread and yield the URL. On leaving, drain; after an error, end at once."""
    from convoy.api.server import Stop, run_server

    stop = Stop()
    came: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            run_server(service, options, on_ready=came.put, stop=stop)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            came.put(error)

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    try:
        first = came.get()
        if isinstance(first, BaseException):
            raise first
        yield first
    except BaseException:
        # The second request, below, ends the server at once.
        stop.request()
        raise
    finally:
        stop.request()
        _join(thread, stop)


def _join(thread: threading.Thread, stop: Stop) -> None:
    """Wait for the server's end. A Ctrl-C meanwhile cuts the answers that it waits for."""
    try:
        thread.join()
    except BaseException:
        stop.request()
        thread.join()
        raise
