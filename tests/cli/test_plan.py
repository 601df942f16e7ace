"""``convoy plan`` on a model directory from elsewhere: its output, and that nothing is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cli.transcript import run_here
from convoy.cluster.own_speed import OwnSpeed
from convoy.config.kernels import EXACT, held_form
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.linear import packed_available
from convoy.model.stage import StageOptions
from convoy.plan.speed import Speed
from convoy.wire.messages.control import StageAssignment
from support.compiled import nothing_compiled

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 105,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "dtype": "float32",
}


HINTS = {
    "invalid span": "layers count from 0: 0:5 is the first six, 0:5,output those and the output, "
    "6:output the rest and it",
    "no member owns": "lengthen a span, for example alpha=0:2,output",
    "no layer is left": "take layers out of a span, or leave gamma out",
}
TOLD = ["--speed", "10,100"]  # so that nothing is measured
HERE = [*TOLD, "--config", "cpu.toml"]  # nor looked for: a plan then takes no torch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a model's directory with weights in name alone: planning must not need more."""
    model = tmp_path / "odd"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "cpu.toml").write_text('[model]\ndevice = "cpu"\n', encoding="utf-8")
    save_file({"model.norm.weight": np.ones(16, dtype=np.float32)}, model / "model.safetensors")
    return tmp_path


@pytest.mark.long
def test_a_model_whose_files_lack_its_layers_is_refused_by_name(folder: Path) -> None:
    config = CONFIG | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    (folder / "odd" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    told = run_here(["plan", "odd", *HERE], folder)
    assert told.returncode != 0
    assert "error: the model's files have no weights of its layers 0 to 5\n" in told.stderr
    assert "hint: download all files of the model" in told.stderr


def test_a_plan_names_every_stage_and_who_can_read_prompts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def measured(*given: Any, form: str, rough: bool) -> OwnSpeed:
        assert not rough
        asked.append((*given[:3], form))
        return OwnSpeed(Speed(1e10, 1e11), busy=0.5)

    monkeypatch.setattr("convoy.cluster.own_speed.own_speed", measured)
    config = ["--config", "cpu.toml"]
    done = run_here(["plan", "odd", "--members", "alpha=4,beta=2", "--threads", "1", *config], folder)
    assert done.returncode == 0, done.stderr
    assert asked == [("exact-f32", 1, "cpu", "")]
    lines = done.stdout.splitlines()
    assert lines[0] == "model    odd (llama, 6 layers)"
    assert lines[2].endswith(" computed in float32")
    assert lines[1] == "route    complete: alpha 0:3,output -> beta 4:5 -> alpha"
    assert any(line.split()[:3] == ["0", "alpha", "(head)"] for line in lines)
    assert any(line.split()[:3] == ["1", "beta", "4:5"] for line in lines)
    assert lines[-1] == "can read prompts: alpha yes (tokens), beta yes (activations)"
    assert done.stderr.splitlines() == [
        "measuring exact-f32 on this machine ...",
        "programs use 50% of this machine's cores: figures may be too low",
    ]


def test_the_reverse_layout_shows_that_a_peer_sees_token_ids(folder: Path) -> None:
    spans = ["--layers", "3:output", "--layers", "0:2"]
    done = run_here(["plan", "odd", "--members", "2", *spans, *HERE, "--json"], folder)
    plan = json.loads(done.stdout)
    assert plan["peers_seeing_token_ids"] == ["beta"]
    assert plan["can_read_prompts"] == {"beta": "tokens", "alpha": "tokens"}
    assert [(stage["member"], stage["start"], stage["end"]) for stage in plan["stages"]] == [
        ("beta", 0, 3),
        ("alpha", 3, 6),
    ]


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (["--layers", "0:3,output", "--layers", "3:5"], "layer 3 claimed twice", 78),
        (["--layers", "0:1,output", "--layers", "3:5"], "no member owns layer 2", 78),
        (["--layers", "0:1,output", "--layers", "2:5", "--members", "3"], "no layer is left for gamma", 78),
        (["--layers", "0:2,output", "--layers", "3:output"], "the output claimed twice, by alpha", 78),
        (["--layers", "0-2"], "invalid span '0-2'", 78),
        (["--members", "7"], "7 members cannot share 6 layers", 1),
    ],
)
def test_a_plan_that_cannot_be_is_one_line_and_an_exit_code(
    folder: Path, flags: list[str], message: str, code: int
) -> None:
    done = run_here(["plan", "odd", *flags, *HERE], folder)
    assert done.returncode == code
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[0]
    assert done.stderr.startswith("error: ")
    for part, hint in HINTS.items():
        assert part not in message or done.stderr.splitlines()[1] == f"hint: {hint}"


def test_a_directory_without_a_configuration_is_told_what_a_model_is(folder: Path) -> None:
    (folder / "odd" / "config.json").unlink()
    done = run_here(["plan", "odd"], folder)
    assert done.stderr.startswith(
        "error: odd has no config.json\nhint: give the directory itself of a Hugging"
    )


@pytest.mark.parametrize("kernel", ["exact-f32", "plain-f32"])
@pytest.mark.parametrize("spans", [("0:5,output", "6:11"), ("6:output", "0:5"), ("0:5", "6:output")])
def test_a_plans_weights_are_those_of_the_stages_that_are_loaded(
    tmp_path: Path, kernel: str, spans: tuple[str, str]
) -> None:
    if kernel == "exact-f32" and not packed_available():
        pytest.skip("no packed linears on this machine")
    (tmp_path / "convoy.toml").write_text(
        f'[model]\nname = "demo"\ndevice = "cpu"\nkernel = "{kernel}"\n', encoding="utf-8"
    )
    flags = ["--members", "2", "--layers", spans[0], "--layers", spans[1], "--config", "convoy.toml"]
    planned = json.loads(run_here(["plan", *flags, *TOLD, "--json"], tmp_path).stdout)["stages"]
    source = ModelSource.resolve("demo")
    for stage in planned:
        assignment = StageAssignment(*(stage[key] for key in ("member", "start", "end", "embed", "output")))
        loaded = HostStage.load(source, assignment, StageOptions(kernel=kernel))
        assert loaded.weight_bytes == stage["weight_bytes"]


def test_a_configuration_gives_model_members_and_spans(folder: Path) -> None:
    for name, port in (("mac", 7001), ("box", 7002)):
        run_here(["identity", "new", name, "--address", f"127.0.0.1:{port}"], folder)
    made = run_here(
        ["roster", "new", "home", "mac.card.toml", "box.card.toml", "--head", "box", "--json"], folder
    )
    key = json.loads(made.stdout)["operator_key"]
    (folder / "convoy.toml").write_text(
        f'[cluster]\nname = "mac"\nroster = "roster.toml"\noperator_key = "{key}"\n'
        '[model]\npath = "odd"\nmemory_gb = 1\ndevice = "cpu"\n[plan]\nlayers = {mac = "1:5"}\n',
        encoding="utf-8",
    )
    done = run_here(["plan", "--config", "convoy.toml", *TOLD, "--json"], folder)
    plan = json.loads(done.stdout)
    assert [(stage["member"], stage["span"]) for stage in plan["stages"]] == [
        ("box", "0:0,output"),
        ("mac", "1:5"),
    ]
    assert "unknown" in done.stderr


def test_one_member_is_shown_without_other_ways_to_share(folder: Path) -> None:
    run_here(["identity", "new", "mac", "--address", "127.0.0.1:7001"], folder)
    made = run_here(["roster", "new", "home", "mac.card.toml", "--head", "mac", "--json"], folder)
    key = json.loads(made.stdout)["operator_key"]
    (folder / "convoy.toml").write_text(
        f'[cluster]\nname = "mac"\nroster = "roster.toml"\noperator_key = "{key}"\n'
        '[model]\npath = "odd"\nmemory_gb = 1\ndevice = "cpu"\n',
        encoding="utf-8",
    )
    done = run_here(["plan", "--config", "convoy.toml", *TOLD], folder)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "parallel: single; there is one member, so no other to share layers with" in done.stdout
    assert "pipeline" not in done.stdout
    assert "tensor" not in done.stdout


POLICY = """
[[placement]]
keep = ["embedding", "output", "first:2", "last:1"]
on = "hardware"

[[placement]]
keep = ["last:1"]
members = ["gamma"]
"""


@pytest.fixture
def policy(folder: Path) -> Path:
    file = folder / "policy.toml"
    file.write_text(POLICY, encoding="utf-8")
    return folder


def test_a_plan_says_which_rule_excludes_whom(policy: Path) -> None:
    levels = ["--level", "alpha=hardware", "--level", "gamma=hardware", "--level", "beta=self_signed"]
    flags = ["plan", "odd", "--members", "3", "--policy", "policy.toml", *levels, *HERE]
    shown = run_here(flags, policy)
    assert shown.returncode == 0, shown.stderr
    first, second = shown.stdout.splitlines()[-4:-2]
    assert "the embedding, layers 0-1, layer 5 and the output" in first
    assert first.endswith("alpha, gamma  beta (self_signed)")
    assert second.endswith("gamma         alpha (hardware), beta (self_signed)")
    plan = json.loads(run_here([*flags, "--json"], policy).stdout)
    assert [(s["member"], s["start"], s["end"]) for s in plan["stages"]] == [
        ("alpha", 0, 2),
        ("beta", 2, 4),
        ("gamma", 4, 6),
    ]
    assert plan["rules"][0]["excluded"] == [
        {
            "member": "beta",
            "level": "self_signed",
            "reason": "rule 1: the embedding, layers 0-1, layer 5 and the output must be on members of level "
            "hardware, and beta has self_signed",
        }
    ]


def test_a_plan_counts_no_more_of_an_offer_than_the_policy_allows(folder: Path) -> None:
    (folder / "policy.toml").write_text("[[offer]]\nmax_memory_gb = 4\n", encoding="utf-8")
    members = ["--members", "alpha=4,beta=16000", "--policy", "policy.toml", *HERE]
    done = run_here(["plan", "odd", *members, "--json"], folder)
    plan = json.loads(done.stdout)
    assert [stage["memory_bytes"] for stage in plan["stages"]] == [4 * 10**9] * 2
    assert len({stage["end"] - stage["start"] for stage in plan["stages"]}) == 1
    assert "beta offers 16.0 TB, and the policy lets 4.0 GB count" in done.stderr


def test_a_plan_with_a_rule_for_an_unknown_member_is_refused(folder: Path) -> None:
    rules = '[[offer]]\nmax_memory_gb = 4\n[[offer]]\nmax_memory_gb = 0.5\nmembers = ["betta"]\n'
    (folder / "policy.toml").write_text(rules, encoding="utf-8")
    flags = ["--members", "alpha=1GB,beta=1GB", "--policy", "policy.toml", *HERE]
    done = run_here(["plan", "odd", *flags], folder)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "error: the policy's [[offer]] rule 2 names betta, which is no member" in done.stderr
    assert "hint: the members are alpha, beta;" in done.stderr


def test_a_plan_that_rules_forbid_shows_the_rules_and_names_the_member(policy: Path) -> None:
    (policy / "policy.toml").write_text(POLICY.replace("gamma", "beta"), encoding="utf-8")
    flags = ["plan", "odd", "--policy", "policy.toml", *HERE]
    done = run_here([*flags, "--level", "alpha=hardware"], policy)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].split()[:3] == ["rule", "keeps", "on"]
    assert "rule 1: layer 5 must be on members of level hardware, and beta has none" in done.stderr
    assert "hint: alpha, the head, holds the other end" in done.stderr
    as_json = run_here([*flags, "--json"], policy)
    assert json.loads(as_json.stdout)["error"]["type"] == "PlanError"


def test_members_below_the_minimum_get_no_stage_and_are_named(folder: Path) -> None:
    (folder / "strict.toml").write_text('[attestation]\nminimum = "hardware"\n', encoding="utf-8")
    flags = ["plan", "odd", "--members", "3", "--policy", "strict.toml", "--level", "gamma=hardware", *HERE]
    shown = run_here(flags, folder)
    assert shown.stdout.splitlines()[-2] == "no stage: beta has none, and the policy's minimum is hardware"
    plan = json.loads(run_here([*flags, "--json"], folder).stdout)
    assert [stage["member"] for stage in plan["stages"]] == ["alpha", "gamma"]
    assert [out["member"] for out in plan["left_out"]] == ["beta"]


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("zeta=hardware", "--level zeta=hardware names no member, expected NAME=LEVEL for alpha, beta"),
        ("alpha=gold", "--level alpha=gold: there is no level 'gold', expected none, self_signed, hardware"),
        ("alpha", "--level alpha names no member"),
    ],
)
def test_a_level_that_makes_no_sense_is_wrong_usage(folder: Path, level: str, message: str) -> None:
    done = run_here(["plan", "odd", "--level", level], folder)
    assert done.returncode == 2
    assert message in done.stderr


def planned(folder: Path, *flags: str) -> Any:
    done = run_here(["plan", "odd", *HERE, "--json", *flags], folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_members_of_a_plan_count_float32_where_nothing_is_compiled(folder: Path) -> None:
    asked = ["plan", "demo", "--members", "alpha=1,beta=1", *HERE]
    with nothing_compiled():
        shown, plan = (run_here([*asked, *more], folder).stdout for more in ([], ["--json"]))
    assert "unpacked: alpha, beta (to float32, without compiled code; " in shown
    spec = ModelSource.resolve("demo").spec
    for stage in json.loads(plan)["stages"]:
        ends = {"embed": stage["embed"], "output": stage["output"]}
        held = spec.weight_bytes(stage["start"], stage["end"], **ends, dtype=held_form(EXACT, unpacks=True))
        assert (stage["kernel"], stage["weight_bytes"]) == (EXACT, held)


def test_a_standby_gets_no_stage_and_is_named(folder: Path) -> None:
    plan = planned(folder, "--members", "3", "--standby", "gamma")
    assert [stage["member"] for stage in plan["stages"]] == ["alpha", "beta"]
    assert plan["standbys"] == ["gamma"]
    for name, why in (("zeta", "expected a member: alpha, beta"), ("alpha", "which is the head")):
        done = run_here(["plan", "odd", "--standby", name], folder)
        assert done.returncode == 2
        assert f"--standby is {name}, {why}" in done.stderr


def test_rounded_weights_take_less_memory_in_a_plan_too(folder: Path) -> None:
    # inputs that fill groups
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    (folder / "odd" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plain, rounded = planned(folder), planned(folder, "--quantize", "q8")
    assert {stage["kernel"] for stage in rounded["stages"]} == {"exact-q8"}
    assert rounded["weight_bytes"] < 0.7 * plain["weight_bytes"]


def test_blocks_are_those_of_each_cache_group(folder: Path) -> None:
    config = CONFIG | {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full") * 2],
    }
    (folder / "odd" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    blocks = planned(folder)["blocks"]
    full, window = blocks["groups"]
    assert (full["name"], full["ring"], full["num_layers"]) == ("full", None, 2)
    assert (window["name"], window["num_layers"]) == ("window-32", 4)
    assert full["num_blocks"] == 32 * 128 // 16, "a full batch of full contexts"
    assert blocks["is_all_wanted"]
    shown = run_here(["plan", "odd", *HERE], folder).stdout
    assert "as many as are wanted; beside weights and K/V a step takes up to" in shown


def test_rates_follow_from_what_the_flags_say(folder: Path) -> None:
    flags = ["--members", "alpha=1,beta=1", "--round-trip", "50"]
    rates = planned(folder, *flags)["rates"]
    assert rates["decode"]["tokens_per_s"] == pytest.approx(20, rel=0.01)
    assert rates["decode"]["limit"].startswith("the hop from")
    assert rates["assumed"] == ["wires that carry 100 MB/s"]
    shown = run_here(["plan", "odd", "--speed", "beta=0.001,100", *HERE, *flags], folder)
    line = next(line for line in shown.stdout.splitlines() if "prefill" in line)
    assert line.endswith("limited by beta's memory bandwidth")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--speed", "fast"),
        ("--speed", "10"),
        ("--speed", "10,100,1"),
        ("--speed", "-1,5"),
        ("--speed", "zeta=1,1"),
        ("--round-trip", "0"),
        ("--round-trip", "alpha,zeta=1"),
        ("--round-trip", "alpha=1"),
    ],
)
def test_a_speed_or_round_trip_that_makes_no_sense_is_wrong_usage(
    folder: Path, flag: str, value: str
) -> None:
    done = run_here(["plan", "odd", flag, value, *(HERE if "trip" in flag else HERE[2:])], folder)
    assert done.returncode == 2
    assert f"{flag} " in done.stderr
    assert value in done.stderr


def test_ranks_are_shown_with_their_share_and_all_ways_beside_each_other(folder: Path) -> None:
    flags = ["--members", "2", "--parallel", "tensor", *HERE]
    shown = json.loads(run_here(["plan", "odd", *flags, "--json"], folder).stdout)
    assert shown["parallel"]["mode"] == "tensor"
    assert shown["parallel"]["reason"] == "asked for: tensor"
    assert [stage["ranks"] for stage in shown["stages"]] == [["alpha", "beta"]]
    assert 0.5 <= shown["stages"][0]["weight_share"] < 0.6, "both hold the one K/V head"
    assert shown["token_id_members"] == ["alpha", "beta"]
    assert shown["rates_by_mode"].keys() == {"single", "pipeline", "tensor"}
    assert shown["tensor"]["num_all_reduces"] == 2 * 6 + 1
    lines = run_here(["plan", "odd", *flags], folder).stdout.splitlines()
    assert lines[1] == "route    complete: alpha+beta 0:output"
    assert any(line.startswith("tensor *") for line in lines)
    assert any("tensor pays 13 all-reduces of 64 B a step" in line for line in lines)


def test_ranks_that_cannot_be_are_an_error_with_both_numbers(folder: Path) -> None:
    done = run_here(["plan", "odd", "--members", "3", "--parallel", "tensor", "--ranks", "3", *HERE], folder)
    assert done.returncode == 1
    assert "tensor parallelism was asked for, and cannot be" in done.stderr
    assert "2 heads" in done.stderr
    assert "3 ranks" in done.stderr
    wrong = run_here(["plan", "odd", "--parallel", "both", *HERE], folder)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--parallel is both, expected auto, pipeline, tensor, single" in wrong.stderr


def test_a_mode_that_was_asked_for_is_not_followed_by_reasons_against_others(folder: Path) -> None:
    # Its two heads make no three ranks.
    flags = ["plan", "odd", "--members", "3", "--ranks", "3", *HERE]
    for asked in ("single", "pipeline"):
        lines = run_here([*flags, "--parallel", asked], folder).stdout.splitlines()
        assert f"parallel: {asked}; asked for: {asked}" in lines
        assert not [line for line in lines if "3 ranks" in line]
    alone = run_here(["plan", "odd", "--members", "2", "--parallel", "single", *HERE], folder).stdout
    assert "all-reduces" not in alone
    chosen = run_here(flags, folder).stdout
    assert "parallel: pipeline; " in chosen
    assert "3 ranks" in chosen


def test_devices_that_do_not_run_yet_have_their_own_kernels_and_share_of_memory(folder: Path) -> None:
    flags = ["--device", "box=cuda:24GB", "--device", "old=cpu:16GB", *TOLD]
    done = run_here(["plan", "odd", *flags, "--json"], folder)
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout)["stages"]
    kernels = [(stage["member"], stage["kernel"], stage["memory_bytes"]) for stage in stages]
    assert kernels == [("box", "cuda-bf16", 22_080_000_000), ("old", EXACT, 12_800_000_000)]
    assert "box: cuda with 24.0 GB, of which 22.1 GB count" in done.stderr
    lone = run_here(["plan", "odd", "--device", "box=cuda:24GB", "--quantize", "q4", "--json"], folder)
    assert json.loads(lone.stdout)["stages"][0]["kernel"] == "cuda-int4"
    assert (
        "that box is as fast as a CUDA card with 400 GB/s" in json.loads(lone.stdout)["rates"]["assumed"][0]
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "box"], "--device is 'box', expected NAME=cuda:24GB, NAME=mlx:16GB or NAME=cpu:16GB"),
        (["--device", "cuda:24GB"], "--device is 'cuda:24GB', expected NAME=cuda:24GB"),
        (["--device", "b x=cpu:1GB"], "--device is 'b x=cpu:1GB', expected"),
        (["--device", "box=tpu:24GB"], "--device box is on 'tpu', expected cpu or mlx or cuda"),
        (["--device", "box=cuda:0GB"], "--device box has '0GB', expected a number and GB"),
        (["--device", "box=cuda:0"], "--device box has '0', expected a number and GB"),
        (["--device", "box=cuda:-1GB"], "--device box has '-1GB'"),
        (["--device", "box=cuda:1e300GB"], "--device box has '1e300GB'"),
        (["--device", "box=cpu:99999999GB"], "above 0GB and up to 1000000GB"),
        (["--device", "box=cpu:nanGB"], "--device box has 'nanGB'"),
        (["--device", "a=cpu:1GB", "--device", "a=cpu:2GB"], "--device names a twice"),
        (["--device", "a=cpu:1GB", "--members", "2"], "--members and --device both name the members"),
        (["--members", "a=1e300"], "--members has 'a=1e300'"),
        (["--members", "a=inf"], "--members has 'a=inf'"),
    ],
)
def test_a_device_that_makes_no_sense_is_wrong_usage(folder: Path, flags: list[str], message: str) -> None:
    done = run_here(["plan", "odd", *flags], folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert "hint: " in done.stderr
