"""What the picture of a cluster says beside its stages."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from convoy.cli.show.cluster_status import (
    absent_text,
    forecast_lines,
    guesses_text,
    idle_text,
    models_text,
    print_cluster,
    recoveries_text,
    stage_rows,
    standbys_text,
)
from convoy.cluster.status import (
    AbsentStatus,
    ClusterStatus,
    Forecast,
    IdleStatus,
    LossForecast,
    ModelStatus,
    PlanForecast,
    StageStatus,
    StandbyStatus,
)


def cluster(**fields: Any) -> ClusterStatus:
    numbers = ("generation", "running", "waiting", "num_blocks", "free_blocks", "steps", "prompt_tokens")
    base: dict[str, Any] = dict.fromkeys(numbers, 0) | dict.fromkeys(
        ("model", "reason", "route", "kernel"), ""
    )
    return ClusterStatus(**base, ready=True, stages=[], generated_tokens=0, ring_s=None, **fields)


def test_a_standby_is_named_with_what_it_has_loaded() -> None:
    text = standbys_text([StandbyStatus("gamma", "6-11"), StandbyStatus("delta")])
    assert text == "gamma (has loaded layers 6-11), delta (nothing loaded yet)"


def test_an_idle_member_is_named_with_the_time_since() -> None:
    noon_s = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))
    text = idle_text([IdleStatus("gamma", noon_s), IdleStatus("delta", noon_s + 61)])
    assert text == "gamma (no layers since 2026-11-22 12:00:00), delta (no layers since 2026-11-22 12:01:01)"


def test_an_absent_member_is_named_with_the_time_since_and_what_the_head_does() -> None:
    noon_s = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))
    gone, unseen = AbsentStatus("gamma", noon_s), AbsentStatus("delta")
    assert absent_text([gone]) == "gamma (gone since 2026-11-22 12:00:00); the head keeps dialling it"
    assert absent_text([gone, unseen]) == (
        "gamma (gone since 2026-11-22 12:00:00), delta (not seen since this head started); "
        "the head keeps dialling them"
    )


def test_several_models_and_one_that_is_not_loaded_are_shown_with_their_state() -> None:
    loaded, unloaded = ModelStatus("demo", "loaded"), ModelStatus("small", "unloaded")
    assert models_text(cluster()) == cluster().model
    assert models_text(cluster(models=[loaded])) == cluster().model
    assert models_text(cluster(models=[loaded, unloaded])) == "demo (loaded), small (unloaded)"
    assert models_text(cluster(models=[unloaded])) == "small (unloaded)"


def test_guesses_are_off_or_counted() -> None:
    assert guesses_text(cluster()) == "off"
    told = guesses_text(cluster(guesses=8, drafted_tokens=40, accepted_tokens=30))
    assert told == "40 run, 30 of them right; at most 8 at once"


def test_recoveries_after_which_a_text_may_differ_say_where() -> None:
    assert recoveries_text(cluster(recoveries=2)) == "2"
    told = recoveries_text(cluster(recoveries=2, near_ties=3))
    assert told == "2; 3 tokens since then had a rival (near ties)"


def test_the_forecast_is_a_line_for_each_question() -> None:
    assert forecast_lines(cluster()) == []
    both = {"alpha": "layers 0-5", "beta": "layers 6-11"}
    told = Forecast(
        context=512,
        running=PlanForecast(both, 41.26, "memory", 4096),
        losses=[LossForecast("beta", PlanForecast(refused="alpha has 2 GB\nand needs 4 GB"))],
        added_bytes=24 * 10**9,
        added=PlanForecast(both, None, "", 8192),
    )
    assert forecast_lines(cluster(forecast=told, lone_step_s=0.025)) == [
        "one request alone: predicted 41.3 tokens/s, measured 40 tokens/s; what limits it most is memory",
        "if beta is lost: the model does not fit: alpha has 2 GB and needs 4 GB",
        "with one more machine of 24.0 GB: layers 0-5 on alpha, layers 6-11 on beta, room for 8192 tokens",
    ]
    unknown = msgspec.structs.replace(told, running=PlanForecast(both))
    [first, *_] = forecast_lines(cluster(forecast=unknown))
    assert first == "one request alone: predicted no rate without a measured machine, measured nothing yet"


def test_a_rank_is_shown_with_its_share_of_the_stage_and_a_member_alone_without() -> None:
    def row(**changes: Any) -> tuple[object, ...]:
        fields: dict[str, Any] = {"member": "beta", "can_read_prompts": "tokens", "address": ""}
        fields |= {"weight_bytes": 500_000} | changes
        (found,) = stage_rows([StageStatus(start=0, end=4, embed=True, output=True, **fields)])
        return found

    assert row()[3] == "500.0 kB"
    assert row()[6] == "yes (tokens)"
    assert row(can_read_prompts="activations")[6] == "yes (activations)"
    assert row(world_size=2, weight_share=0.5023)[1:4:2] == ("beta (rank 0)", "500.0 kB (0.50 of the stage)")


def test_a_member_without_compiled_code_is_named_beside_the_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages = [
        StageStatus(name, start, start + 4, start == 0, False, 500_000, "tokens", "", unpacks=name == "beta")
        for name, start in (("alpha", 0), ("beta", 4))
    ]
    print_cluster(msgspec.structs.replace(cluster(), stages=stages))
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unpacked: ")]
    assert told == ["unpacked: beta (to float32, without compiled code; `convoy doctor` there says why)"]
