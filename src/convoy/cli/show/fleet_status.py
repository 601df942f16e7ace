"""Draw the picture of a fleet in a terminal for ``convoy top``: its providers, models and requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from convoy.cli.show.output import counted, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from convoy.fleet.status import (
        ConnectedProvider,
        FleetRecord,
        FleetStatus,
        GoneProvider,
        OfferedModel,
        RefusedProviders,
    )

# A picture of more rows is not readable.
_MAX_ROWS, _MAX_LINES = 100, 8
_PROVIDERS = ("provider", "models", "taken", "level", "alone", "answers", "failures", "connected", "state")
# The columns for a terminal that has no room for all of them.
_FEW_PROVIDERS = ("provider", "models", "taken", "answers", "failures", "state")
_WIDE = 110
_MODELS = ("model", "providers", "free", "waiting", "context")
_WENT = {"left": "has left", "lost": "is lost", "removed": "is removed"}


def fleet_picture(status: FleetStatus, rates: tuple[float, float], width: int) -> RenderableType:
    """Return the whole picture. Texts of providers are shown as they are, without markup.

    ``rates`` are generated tokens and those of prompts a second.
    """
    from rich.console import Group
    from rich.text import Text

    record = status.record
    state = Text.assemble(
        ("fleet", "bold"),
        "  ",
        ("ready", "green") if status.ready else ("not ready", "bold red"),
        f": {one_line(status.reason)}",
    )
    told = ["an API key sees the models, and the requests of its own account"]
    tables = [_table(_MODELS, [_model_cells(one) for one in status.offered])]
    if record is not None:
        told = list(_record_lines(record))
        columns = _PROVIDERS if width >= _WIDE else _FEW_PROVIDERS
        cells = (dict(zip(_PROVIDERS, _provider_cells(one), strict=True)) for one in record.providers)
        rows = [[one[name] for name in columns] for one in cells]
        tables.insert(0, _table(columns, rows, record.num_providers))
    return Group(
        state,
        Text(_load_text(status, rates)),
        *(Text(one_line(line)) for line in told),
        *(part for table in tables for part in (Text(), table)),
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], number: int = 0) -> RenderableType:
    """Return the table of the first ``rows``, and how many more of ``number`` there are."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows[:_MAX_ROWS]:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    more = max(number, len(rows)) - min(len(rows), _MAX_ROWS)
    return Group(table, Text(f"and {more:,} more")) if more else table


def _load_text(status: FleetStatus, rates: tuple[float, float]) -> str:
    told = f"{status.running} running, {status.waiting} waiting"
    if status.record is not None:
        taken, slots = _sum(room for one in status.record.providers for room in _rooms(one))
        told += f"; {taken} of {counted(slots, 'place')} taken"
    return f"{told}; {rates[0]:.1f} tokens/s generated, {rates[1]:.1f} of prompts"


def _rooms(provider: ConnectedProvider) -> Iterator[tuple[int, int]]:
    """Yield the taken places and all places, by model."""
    for name, room in provider.places.items():
        yield provider.models.get(name, 0) + room.taken_elsewhere, room.slots


def _sum(rooms: Iterable[tuple[int, int]]) -> tuple[int, int]:
    listed = list(rooms)
    return sum(taken for taken, _ in listed), sum(slots for _, slots in listed)


def _provider_cells(provider: ConnectedProvider) -> tuple[str, ...]:
    taken, slots = _sum(_rooms(provider))
    fastest = max((room.tokens_per_s for room in provider.places.values()), default=0.0)
    states = {
        "takes nothing new": provider.draining,
        "on trial": any(room.on_trial for room in provider.places.values()),
    }
    return (
        provider.name,
        ", ".join(provider.places),
        f"{taken} of {slots}",
        provider.level,
        f"{fastest:.3g} tokens/s",
        str(provider.answers),
        str(provider.failures),
        _age(provider.since_unix_s),
        ", ".join(state for state, holds in states.items() if holds),
    )


def _model_cells(model: OfferedModel) -> tuple[str, ...]:
    levels = ", ".join(f"{number} {level}" for level, number in model.levels.items())
    return (
        model.id,
        f"{model.providers} ({levels})" if levels else str(model.providers),
        "-" if model.free_slots is None else str(model.free_slots),
        str(model.waiting),
        str(model.max_context) if model.providers else "-",
    )


def _record_lines(record: FleetRecord) -> Iterator[str]:
    over, complete = sum(record.outcomes.values()), record.outcomes.get("complete", 0)
    yield (
        f"{complete} complete, {over - complete} ended otherwise, {record.retries} tried again, "
        f"{record.sealed} came sealed; providers lost {record.num_lost}, removed {record.num_removed}"
    )
    approve = "waits for approval: convoy coordinator providers --approve"
    yield from _first([f"{approve} {key} NAME" for key in record.unapproved])
    yield from _first([_gone_text(one) for one in record.gone])
    yield from _first([_refusal_text(one) for one in record.refusals])


def _first(lines: Sequence[str]) -> Iterable[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    return [*lines[:_MAX_LINES], f"and {len(lines) - _MAX_LINES} more"]


def _gone_text(gone: GoneProvider) -> str:
    return f"{gone.name} {_WENT[gone.how]} since {_age(gone.since_unix_s)}: {gone.reason}"


def _refusal_text(refused: RefusedProviders) -> str:
    times, ago = counted(refused.times, "time"), _age(refused.last_unix_s)
    return f"refused {times}, last {ago} ago: {refused.reason}"


def _age(since_unix_s: float) -> str:
    """Return the time since then in its largest unit, by this machine's clock."""
    seconds = max(0.0, time.time() - since_unix_s)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
