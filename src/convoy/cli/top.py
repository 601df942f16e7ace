"""``convoy top``: the page's picture of a cluster or a fleet in a terminal, drawn anew when it changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from convoy.cli.open import looking
from convoy.cli.running.endpoint import ApiKeyFlag, CaFlag, UrlFlag, client_key
from convoy.cli.show.cluster_status import (
    absent_text,
    forecast_lines,
    idle_text,
    layers_text,
    models_text,
    standbys_text,
)
from convoy.cli.show.fleet_status import fleet_picture
from convoy.cli.show.output import format_bytes, format_seconds, one_line, reads_text
from convoy.config.type_resolution import resolved
from convoy.errors import PeerUnreachable
from convoy.sdk.client import status_of
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint, ServerBusy

if TYPE_CHECKING:
    from rich.console import RenderableType

    from convoy.cluster.status import ClusterStatus, StageStatus, StepPath
    from convoy.fleet.status import FleetStatus

# The server sends a heartbeat every 5 s.
_SILENT_S = 15.0
_RETRY_S = 1.0
_COLUMNS = (
    *("member", "layers", "device", "weights", "K/V", "free", "link", "keys", "round trip", "sealed"),
    *("reads prompts", "level"),
)
# The columns for a terminal that has no room for all of them.
_FEW_COLUMNS = ("member", "layers", "weights", "K/V", "free", "round trip", "reads prompts")
_WIDE = 130
_KINDS = ("wire", "wait", "compute", "seal")


def top(
    url: UrlFlag = DEFAULT_URL,
    api_key_file: ApiKeyFlag = None,
    ca: CaFlag = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
) -> None:
    """Watch a running cluster in the terminal: members, links, load.

    Of a coordinator at --url, it shows the providers: to its user on its machine without a key, elsewhere an
    account's part. Ctrl-C ends it. Where the output is no terminal, one picture is printed.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    endpoint = Endpoint.of(
        *(url, client_key(api_key_file), ca, _SILENT_S),
        server="head or coordinator",
        key_hint="give the key's file with --api-key-file, or run this as the server's user on its machine",
    )
    console = Console()
    with looking(endpoint) as reader:
        first = _read(reader, reader.get("/status"))
    drawn = _drawn(first, (0.0, 0.0), console.width)
    if once or not sys.stdout.isatty():
        console.print(drawn)
        return
    try:
        with Live(drawn, console=console, screen=True, auto_refresh=False) as live:
            for shown in _pictures(endpoint, Moment(first, time.monotonic()), lambda: console.width):
                live.update(shown if not isinstance(shown, str) else Text(shown, "bold red"), refresh=True)
    except KeyboardInterrupt:
        return


@dataclass(frozen=True, slots=True)
class Moment:
    """Hold a status, and when it came on the monotonic clock."""

    status: ClusterStatus | FleetStatus
    at_s: float

    def rates(self, since: Moment | None) -> tuple[float, float]:
        """Return the generated tokens and those of prompts a second.

        A server that began anew counts from 0.
        """
        if since is None or self.status.generated_tokens < since.status.generated_tokens:
            return 0.0, 0.0
        passed_s = max(self.at_s - since.at_s, 0.05)
        generated = self.status.generated_tokens - since.status.generated_tokens
        return generated / passed_s, (self.status.prompt_tokens - since.status.prompt_tokens) / passed_s


def _pictures(endpoint: Endpoint, last: Moment, width: Callable[[], int]) -> Iterator[RenderableType | str]:
    """Yield a picture for each status, and a sentence whenever the server is gone. Never ends by itself."""
    while True:
        try:
            # A server that began anew knows no session of before.
            with looking(endpoint) as reader:
                for event in reader.watch("/status"):
                    if "failed" in event:
                        yield f"the server cannot say its status ({one_line(str(event['failed'])[:200])})"
                        continue
                    now = Moment(_read(reader, event), time.monotonic())
                    yield _drawn(now.status, now.rates(last), width())
                    last = now
        except (PeerUnreachable, ServerBusy) as error:
            yield f"{one_line(error.message)}; trying again (Ctrl-C ends)"
        time.sleep(_RETRY_S)


def _read(endpoint: Endpoint, answer: object) -> ClusterStatus | FleetStatus:
    """Return a body or an event of `GET /status`. Raises `Incompatible` if it has another shape."""
    if not isinstance(answer, dict) or "offered" not in answer:
        return status_of(endpoint, answer)
    from convoy.fleet.status import FleetStatus

    try:
        return msgspec.convert(answer, resolved(FleetStatus))
    except msgspec.ValidationError as error:
        raise endpoint.not_ours(f"its status is of another shape: {error}") from None


def _drawn(status: ClusterStatus | FleetStatus, rates: tuple[float, float], width: int) -> RenderableType:
    from convoy.cluster.status import ClusterStatus

    if isinstance(status, ClusterStatus):
        return picture(status, rates, width)
    return fleet_picture(status, rates, width)


def picture(
    status: ClusterStatus, rates: tuple[float, float] = (0.0, 0.0), width: int = _WIDE
) -> RenderableType:
    """Return the whole picture. Texts of members are shown as they are, without markup.

    On fewer than ``_WIDE`` columns the table has the most important ones alone.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = _COLUMNS if width >= _WIDE else _FEW_COLUMNS
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for stage in status.stages:
        cells = dict(zip(_COLUMNS, _cells(stage), strict=True))
        table.add_row(*(Text(one_line(cells[name])) for name in columns))
    state = Text.assemble(
        (models_text(status), "bold"),
        "  ",
        ("ready", "green") if status.ready else ("not ready", "bold red"),
        f": {one_line(status.reason)}",
    )
    told = [*_step_lines(status.step_path), *forecast_lines(status), *_others(status)]
    rest = f"roster epoch {status.roster_epoch}; {status.parallel.mode}: {status.parallel.reason}"
    return Group(
        state,
        Text(_load_text(status, rates)),
        Text(),
        table,
        Text(),
        *(Text(one_line(line)) for line in told),
        Text(one_line(rest), "dim"),
    )


def _load_text(status: ClusterStatus, rates: tuple[float, float]) -> str:
    used = 100 * (status.num_blocks - status.free_blocks) / max(1, status.num_blocks)
    return (
        f"{status.running} running, {status.waiting} waiting; {rates[0]:.1f} tokens/s generated, "
        f"{rates[1]:.1f} of prompts; K/V {used:.0f} % in use; round the ring {_time(status.ring_s)}; "
        f"losses survived {status.recoveries}"
    )


def _cells(stage: StageStatus) -> Iterable[str]:
    free = max(0, stage.memory_bytes - stage.weight_bytes - stage.kv_bytes)
    sizes = (format_bytes(size) for size in (stage.weight_bytes, stage.kv_bytes, free))
    about = (stage.member, layers_text(stage), stage.device or "gone", *sizes)
    trust = (reads_text(stage.can_read_prompts), stage.level)
    if stage.head:
        return (*about, "this head", "-", "-", "-", *trust)
    age = "-" if stage.keyed_unix_s is None else f"{max(0.0, time.time() - stage.keyed_unix_s):.0f} s"
    sealed = format_bytes(stage.sealed_bytes_sent + stage.sealed_bytes_received)
    return (*about, stage.cipher or "gone", age, _time(stage.round_trip_s), sealed, *trust)


def _step_lines(path: StepPath | None) -> list[str]:
    """Return the last step by kind and by member; nothing if the way of a step is not known."""
    if path is None or not path.step_s:
        return []
    kinds = {kind: sum(getattr(part, f"{kind}_s") for part in path.parts) for kind in _KINDS}
    shares = ", ".join(f"{kind} {100 * took / path.step_s:.0f} %" for kind, took in kinds.items())
    members = ", ".join(
        f"{part.member} {_time(part.compute_s + part.seal_s + part.wait_s + part.wire_s)}"
        for part in path.parts
    )
    return [f"last step {_time(path.step_s)}: {shares}", f"  on its way: {members}"]


def _others(status: ClusterStatus) -> list[str]:
    told = []
    if status.standbys:
        told.append(f"standbys: {standbys_text(status.standbys)}")
    if status.idle:
        told.append(f"idle: {idle_text(status.idle)}")
    if status.absent:
        told.append(f"absent: {absent_text(status.absent)}")
    return told


def _time(seconds: float | None) -> str:
    return format_seconds(seconds) or "unknown"
