"""Ranks of one member on two CUDA devices, against one device and against the library."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from convoy.errors import CollectiveError, StepError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import Row, StageAssignment, Step
from support.kernels import error_of, why_not

if why_not() is not None or torch.cuda.device_count() < 2:
    pytest.skip(why_not() or "fewer than two CUDA devices", allow_module_level=True)

from convoy.engine.ranks.device_ranks import DeviceRankStages
from convoy.engine.ranks.load import load_member_stage
from convoy.model.backends.cuda.options import KERNEL
from convoy.model.sampling.output_rows import GREEDY
from support.tiny_models import Chain, build_model

pytestmark = pytest.mark.gpu
TOLERANCE = 3e-2  # as in test_stage.py
KINDS = ("even", "mistral", "qwen3", "gemma3", "gemma4", "gemma4 e", "gpt_oss", "qwen3_moe")
MIXED = ("gemma4", "gpt_oss", "qwen3_moe")
PROMPT = torch.randint(0, 105, (90,), generator=torch.Generator().manual_seed(0)).tolist()
NUM_TOKENS = 16


class Loaded:
    """Load each model once, in weights that bfloat16 can hold, by kind and device."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stages: dict[tuple[str, str], Any] = {}

    def stage(self, kind: str, device: str, kernel: str = KERNEL) -> Any:
        path = self._root / kind.replace(" ", "-")
        if not path.exists():
            build_model(kind).to(torch.bfloat16).save_pretrained(path)
        source = ModelSource.resolve(str(path))
        whole = StageAssignment("m", 0, source.spec.num_layers, embed=True, output=True)
        options = StageOptions(kernel=kernel, device=device, require_tags=False)
        return load_member_stage(source, whole, options)

    def __getitem__(self, key: tuple[str, str]) -> Any:
        if key not in self._stages:
            self._stages[key] = self.stage(*key)
        return self._stages[key]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("ranks"))


def answer(stage: Any) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens, and the logits of each of them."""
    one = Chain([stage])
    rows = [one.run((0, PROMPT))[0][-1]]
    tokens = [int(rows[-1].argmax())]
    while len(tokens) < NUM_TOKENS:
        rows.append(one.run((0, tokens[-1:]))[0][-1])
        tokens.append(int(rows[-1].argmax()))
    return tokens, torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_say_what_one_device_says_and_the_same_bits_again(loaded: Loaded, kind: str) -> None:
    both = loaded[kind, "cuda:0+cuda:1"]
    assert isinstance(both, DeviceRankStages)
    expected, logits = answer(loaded[kind, "cuda:0"])
    found, own = answer(both)
    again, others = answer(both)
    assert (found, True) == (again, torch.equal(own, others))
    same = next((i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), None)
    if same is not None:  # a near tie: what follows is another text
        row = logits[same]
        margin = float((row.max() - row[found[same]]) / row.std())
        print(f"{kind}: another token at {same}, margin {margin:.4f} of the deviation")
        assert margin <= 0.1
        own, logits = own[: same + 1], logits[: same + 1]
    # each is so far from float32, in a direction of its own; where two experts are nearly as good, further
    assert error_of(own, logits) <= (4 if kind in MIXED else 1.5) * TOLERANCE


@pytest.mark.parametrize("kind", ["even", "gpt_oss", "gemma4"])
def test_without_rounding_ranks_are_one_device_but_for_the_order_of_sums(loaded: Loaded, kind: str) -> None:
    logits = [answer(loaded.stage(kind, device, "plain-f32")) for device in ("cuda:0", "cuda:0+cuda:1")]
    assert logits[0][0] == logits[1][0]
    assert (logits[0][1] - logits[1][1]).abs().max() <= 1e-4


def test_samples_on_the_device_are_those_of_its_logits(loaded: Loaded) -> None:
    both = loaded["even", "cuda:0+cuda:1"]
    logits = Chain([both]).run((0, PROMPT))[0]
    hidden = torch.randn(3, both.hidden_size).bfloat16()
    found = [outcome.sampled.token_id for outcome in both.sample(hidden, [GREEDY] * 3).outcomes()]
    assert found == both.output(hidden).argmax(-1).tolist()
    assert logits.shape == (len(PROMPT), both.vocab_size)


@pytest.mark.parametrize("kernel", ["cuda-int8", "cuda-int4"])
def test_rounded_weights_are_shared_too(loaded: Loaded, kernel: str) -> None:
    alone, both = (answer(loaded.stage("even", d, kernel))[1][0] for d in ("cuda:0", "cuda:0+cuda:1"))
    assert error_of(both, alone) <= 0.2  # each rank's slice has scales of its own


def test_a_step_that_makes_no_sense_is_refused_and_the_ranks_go_on(loaded: Loaded) -> None:
    both = loaded["qwen3", "cuda:0+cuda:1"]
    expected = answer(both)[0]
    with pytest.raises(StepError):
        both.run(Step(0, [], [], [Row(9, 5, 1, 1)], b""), None, torch.tensor([1]))
    assert answer(both)[0] == expected


def test_room_and_kv_are_those_of_all_ranks(loaded: Loaded) -> None:
    both, alone = loaded.stage("qwen3", "cuda:0+cuda:1"), loaded["qwen3", "cuda:0"]
    assert both.block_bytes == alone.block_bytes
    assert 0 < both.room_bytes(1 << 33) <= 1 << 33
    answer(both)
    assert both.weight_share < 0.6 or both.weight_bytes < 1 << 20


def test_a_sum_that_was_given_up_ends_the_ranks(loaded: Loaded) -> None:
    both = cast("DeviceRankStages", loaded.stage("even", "cuda:0+cuda:1"))
    one = Chain([cast("Any", both)])
    one.run((0, PROMPT))
    for end in both._ranks.ends:
        # Kernels no longer wait for other ranks, so a late part counts as missing.
        end._count[1] = 1
    with pytest.raises(CollectiveError, match="did not come to a sum"):
        both._ranks.check_sums()
    with pytest.raises(CollectiveError):
        one.run((0, [1]))
    both.release()


def test_a_rank_that_fails_ends_the_other_ranks_and_none_waits(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = cast("DeviceRankStages", loaded.stage("even", "cuda:0+cuda:1"))
    one = Chain([cast("Any", both)])
    one.run((0, PROMPT))

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(both.stages[1], "_compute", fail)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="no memory"):
        one.run((0, [1]))
    assert time.monotonic() - began_s < 10
    monkeypatch.undo()
    with pytest.raises(CollectiveError, match="a rank failed"):
        one.run((0, [1]))
    both.release()
