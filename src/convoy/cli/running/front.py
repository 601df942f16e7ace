"""Start the front process of a head, and run it.

A head runs this module with the log's level and format, and the descriptor of its channel. It is no verb,
because only a head can use it.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from convoy.cli.running.start import leave_interpreter, settle_memory, switch_threads_soon
from convoy.cli.show.logs import json_line, set_up_logs
from convoy.config.kernels import AUTO
from convoy.sdk.head import service_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from convoy.api.front.supervisor import FrontServer
    from convoy.api.listen.options import ServeOptions
    from convoy.api.model_switch import OnChange
    from convoy.api.traces import Traces
    from convoy.cluster.model_loader import KnownModel
    from convoy.cluster.running import RunningCluster
    from convoy.config.settings import Config

# Linux has it where NVIDIA's driver runs.
_DRIVER = Path("/dev/nvidiactl")


class RunServer(Protocol):
    """Serve until a signal; see `api.server.run_server`. Return the number of answers that were cut off."""

    def __call__(
        self,
        *,
        on_ready: Callable[[str], None],
        on_stop: Callable[[], None],
        on_drain: Callable[[int, float], None],
    ) -> int: ...


def front_command(level: str, form: str) -> tuple[str, ...]:
    """Return the command of a front process, but for its descriptor."""
    # With -P no file of the working directory stands in for a module.
    return sys.executable, "-P", "-m", "convoy.cli.running.front", level, form


def wants_front(settings: Config, driver: Path = _DRIVER) -> bool:
    """Return whether a head serves HTTP in a front process: as set, or else on CUDA.

    There a step is short, and the interpreter that starts it is what streams wait for. With device auto, the
    file of the driver decides, because torch takes seconds to load.
    """
    serve, device = settings.serve, settings.model.device
    if serve.http_process is not None:
        return serve.http_process
    # A front process serves one model, which stays loaded.
    if serve.also or serve.keep_alive_s is not None:
        return False
    return device.startswith("cuda") or (device == AUTO and driver.exists())


@contextmanager
def front_server(settings: Config, options: ServeOptions) -> Iterator[FrontServer | None]:
    """Start a front process that loads its modules while the block runs. Yield None if settings want none."""
    if not wants_front(settings):
        yield None
        return
    from convoy.api.front.setup import FrontSetup
    from convoy.api.front.supervisor import FrontOptions, FrontServer

    level = logging.getLevelName(logging.getLogger("convoy").getEffectiveLevel()).lower()
    form = "text" if json_line("") is None else "json"
    command = FrontOptions(front_command(level, form))
    setup = FrontSetup.of(options, settings.telemetry.traces)
    with FrontServer(command, options, setup) as front:
        yield front


def server_of(
    front: FrontServer | None,
    cluster: RunningCluster,
    options: ServeOptions,
    settings: Config,
    also: Sequence[KnownModel] = (),
    on_change: OnChange = lambda _loaded, _line: None,
) -> RunServer:
    """Return the function that serves a cluster: in the front process, or in this one for None."""
    from convoy.sdk.pull import ModelPuller

    puller = ModelPuller(cluster.head, settings)
    service = service_of(
        *(cluster, settings.serve, also),
        keeps_model=front is not None,
        puller=puller,
        on_change=on_change,
    )
    if front is not None:
        return partial(front.run, service, cluster.tokenizer.describe())
    from convoy.api.server import run_server

    return partial(run_server, service, options)


def own_key(front: FrontServer | None, options: ServeOptions, name: str) -> str | None:
    """Return a new API key for a part of this process, or None if the server asks for no key."""
    if front is not None:
        return front.own_key(name)
    return None if options.keys is None else options.keys.own_key(name)


def main() -> None:
    """Run the front process of the arguments."""
    # The head that wrote them has checked them.
    level: Any
    form: Any
    level, form, descriptor = sys.argv[1:]
    set_up_logs(level, form)
    end = leave_interpreter()
    # Without an open stderr there is no place to name the functions of a crash in native code.
    with suppress(OSError, RuntimeError, ValueError):
        faulthandler.enable()
    switch_threads_soon()
    from convoy.api.front.child import run_child

    run_child(int(descriptor), _tracing, settle_memory)
    end(0)


def _tracing(url: str | None) -> AbstractContextManager[Traces]:
    from convoy.cli.flags.traces import tracing

    return tracing(url, "convoy-head")


if __name__ == "__main__":
    main()
