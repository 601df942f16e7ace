"""Print the state of a cluster: the layers of each member and the link to it.

`status` shows it, and so do `serve`, `run` and `demo` with ``--verbose``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from convoy.cli.show.output import counted, format_bytes, format_seconds, one_line, print_table, reads_text
from convoy.config.kernels import AUTO

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from convoy.cluster.status import (
        AbsentStatus,
        ClusterStatus,
        IdleStatus,
        PlanForecast,
        StageStatus,
        StandbyStatus,
    )


def print_stages(status: ClusterStatus) -> None:
    """Print a line for each stage."""
    print_table(
        ("stage", "member", "layers", "weights", "hop round trip", "cipher", "can read prompts", "level"),
        stage_rows(status.stages),
    )


def print_cluster(status: ClusterStatus) -> None:
    """Print a line for each stage, then the route and the state of the cluster."""
    print_stages(status)
    for line in _state_lines(status):
        print(one_line(line))


def _state_lines(status: ClusterStatus) -> Iterator[str]:
    yield f"route: {status.route or 'none, because no model is loaded'}"
    yield f"kernel: {status.kernel}{f' ({status.why_kernel})' if status.why_kernel else ''}"
    if status.kv_dtype not in {"", AUTO}:
        yield f"K/V: {status.kv_dtype}"
    if status.parallel.mode:
        yield f"parallel: {status.parallel.mode}; {status.parallel.reason}"
    for stage in status.stages:
        if stage.device not in {"", "cpu"} or status.kernel == "mixed":
            yield f"device: {stage.member} on {stage.device or 'a device that is gone'}, {stage.kernel}"
    unpacking = [stage.member for stage in status.stages if stage.unpacks]
    if unpacking:
        yield f"unpacked: {unpacked_text(unpacking)}"
    for stage in status.stages:
        if stage.weights_from:
            yield f"weights: {stage.member} got {origins_text(stage.weights_from)}"
    yield f"level: {level_text(status)}"
    if status.standbys:
        yield f"standbys: {standbys_text(status.standbys)}"
    if status.idle:
        yield f"idle: {idle_text(status.idle)}"
    if status.absent:
        yield f"absent: {absent_text(status.absent)}"
    if status.other_bits:
        yield f"other bits: {', '.join(status.other_bits)} (a text may change where their layers move)"


def models_text(status: ClusterStatus) -> str:
    """Return the model, or of several, or of one that is not loaded, each with its state."""
    if len(status.models) < 2 and all(one.state == "loaded" for one in status.models):
        return one_line(status.model)
    return one_line(", ".join(f"{one.name} ({one.state})" for one in status.models))


def stage_rows(stages: Iterable[StageStatus]) -> list[tuple[object, ...]]:
    return [
        (
            index,
            stage.member if stage.world_size == 1 else f"{stage.member} (rank {stage.rank})",
            layers_text(stage),
            format_bytes(stage.weight_bytes)
            + (f" ({stage.weight_share:.2f} of the stage)" if stage.world_size > 1 else ""),
            format_seconds(stage.round_trip_s),
            "this process" if stage.head else stage.cipher or "gone",
            reads_text(stage.can_read_prompts),
            stage.level,
        )
        for index, stage in _numbered(stages)
    ]


def _numbered(stages: Iterable[StageStatus]) -> list[tuple[int, StageStatus]]:
    """Return each entry with the number of its stage. The ranks of a stage share the number."""
    found: list[tuple[int, StageStatus]] = []
    index = -1
    for stage in stages:
        index += stage.rank == 0
        found.append((index, stage))
    return found


def origins_text(origins: Mapping[str, int]) -> str:
    """Return the bytes of each source: the head, a hub, or other members by name."""
    known = {"head": "the head", "hub": "the hub"}
    return ", ".join(
        f"{format_bytes(num_bytes)} from {known.get(source, source)}"
        for source, num_bytes in sorted(origins.items())
    )


def level_text(status: ClusterStatus) -> str:
    """Return the cluster's level, the policy's minimum, and the excluded members."""
    text = status.level
    if status.minimum_level != "none":
        text += f"; the policy's minimum is {status.minimum_level}"
    for one in status.verdicts:
        if one.excluded:
            text += f"; {one.member} has {one.level} and no stage"
    return text


def unpacked_text(members: Iterable[str]) -> str:
    """Return the members that hold float32 in place of the form of the file, and why."""
    why = "to float32, without compiled code; `convoy doctor` there says why"
    return f"{', '.join(members)} ({why})"


def standbys_text(standbys: Iterable[StandbyStatus]) -> str:
    """Return the members that wait for the loss of another, and the layers that each has loaded for that."""
    return ", ".join(
        f"{one.name} (nothing loaded yet)"
        if one.layers is None
        else f"{one.name} (has loaded layers {one.layers})"
        for one in standbys
    )


def idle_text(idle: Iterable[IdleStatus]) -> str:
    """Return the connected members without layers, and since when by this machine's clock."""
    return ", ".join(f"{one.name} (no layers since {_time_text(one.since_unix_s)})" for one in idle)


def absent_text(absent: Sequence[AbsentStatus]) -> str:
    """Return the absent members, since when by this machine's clock, and what the head does."""
    shown = [
        f"{one.name} (not seen since this head started)"
        if one.since_unix_s is None
        else f"{one.name} (gone since {_time_text(one.since_unix_s)})"
        for one in absent
    ]
    return f"{', '.join(shown)}; the head keeps dialling {'it' if len(shown) == 1 else 'them'}"


def _time_text(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def guesses_text(status: ClusterStatus) -> str:
    """Return how many guesses one step may run, and how many were right."""
    if not status.guesses:
        return "off"
    right = f"{status.drafted_tokens} run, {status.accepted_tokens} of them right"
    return f"{right}; at most {status.guesses} at once"


def recoveries_text(status: ClusterStatus) -> str:
    """Return the number of recoveries, and of tokens that may differ because of them."""
    if not status.near_ties:
        return str(status.recoveries)
    return f"{status.recoveries}; {counted(status.near_ties, 'token')} since then had a rival (near ties)"


def forecast_lines(status: ClusterStatus) -> list[str]:
    """Return the predicted rate beside the measured one, and the plan after each loss; nothing if unknown."""
    forecast = status.forecast
    if forecast is None:
        return []
    rate = _rate_text(forecast.running.tokens_per_s) or "no rate without a measured machine"
    measured = _rate_text(1 / status.lone_step_s) if status.lone_step_s else "nothing yet"
    limit = forecast.running.limit and f"; what limits it most is {forecast.running.limit}"
    plans = [(f"if {one.member} is lost", one.plan) for one in forecast.losses]
    plans.append((f"with one more machine of {format_bytes(forecast.added_bytes)}", forecast.added))
    told = [f"one request alone: predicted {rate}, measured {measured}{limit}"]
    told += [f"{when}: {_plan_text(plan)}" for when, plan in plans]
    if forecast.assumed:
        told.append(f"assumed: {'; '.join(forecast.assumed)}")
    return [one_line(line) for line in told]


def _plan_text(plan: PlanForecast) -> str:
    if plan.refused:
        return f"the model does not fit: {plan.refused}"
    rate = _rate_text(plan.tokens_per_s)
    layers = ", ".join(f"{layers} on {name}" for name, layers in plan.layers.items())
    return f"{layers}{rate and f', about {rate}'}, room for {counted(plan.max_kv_tokens, 'token')}"


def _rate_text(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{tokens_per_s:.3g} tokens/s"


def layers_text(stage: StageStatus) -> str:
    """Return the layers like ``embed + 0-5 + output``: inclusive, as in the command line's spans."""
    parts = [f"{stage.start}-{stage.end - 1}"]
    if stage.embed:
        parts.insert(0, "embed")
    if stage.output:
        parts.append("output")
    return " + ".join(parts)
