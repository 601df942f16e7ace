"""A CUDA stage against the whole model of transformers, and against itself: cut, chunked, captured or not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.errors import ModelError, StepError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.output_rows import GREEDY, SampleJob, sample_all
from convoy.model.sampling.params import SamplingParams
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step
from support.kernels import error_of, why_not

if why_not() is not None or not torch.cuda.is_available():
    pytest.skip(why_not() or "no CUDA device", allow_module_level=True)

import transformers

from convoy.model.backends.cuda.decoder import DeviceDecoder
from convoy.model.backends.cuda.options import CHECK_KERNEL, KERNEL
from convoy.model.backends.cuda.several_stages import SeveralStages
from convoy.model.backends.cuda.stage import CudaStage
from convoy.model.backends.registry import load_stage
from convoy.model.device import check_device
from convoy.model.stage import StageOptions
from support.tiny_models import Chain, build_model

pytestmark = pytest.mark.gpu
# of bfloat16 through five layers, against float32: of the logits' norm
TOLERANCE = 3e-2
OURS = ("odd", "even", "mistral", "qwen2", "qwen3", "mixed")
# Families with experts, latents or states.
FAMILIES = ("gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5", "qwen3_5_moe")
LIBRARYS = ("biased", "gemma2", "gemma3", "gemma4", "gemma4 e", "phi3", *FAMILIES)


class Directories:
    """Make tiny models, each when it is first asked for, with weights that bfloat16 can hold."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, kind: str) -> Path:
        path = self._root / kind.replace(" ", "-")
        if not path.exists():
            build_model(kind).to(torch.bfloat16).save_pretrained(path)
        return path


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("gpu"))


def chain(
    directory: Path,
    *cuts: int,
    captured: bool = True,
    kernel: str = KERNEL,
    devices: Sequence[str] = ("cuda",),
) -> Chain:
    """Load stages on the devices in turn, each with a kernel that runs there."""
    source = ModelSource.resolve(str(directory))
    limits = [0, *cuts, source.spec.num_layers]
    stages = []
    for i, (start, end) in enumerate(pairwise(limits)):
        assignment = StageAssignment(f"m{i}", start, end, embed=i == 0, output=i == len(limits) - 2)
        device = devices[i % len(devices)]
        chosen = kernel if device != "cpu" else "plain-f32"
        options = StageOptions(kernel=chosen, device=device, require_tags=False)
        stage = load_stage(source, assignment, options)
        if not captured:
            device_stage(stage).captured = False
        stages.append(stage)
    # A state has one block, however long its sequence is.
    return Chain(stages, rings=[1 if group.is_state else None for group in source.spec.cache_groups])


def device_stage(stage: Any) -> CudaStage:
    """Check that a loaded stage is one of CUDA, and return it."""
    assert isinstance(stage, CudaStage)
    return stage


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 105, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(directory: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return logits of transformers, eager attention, float32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


def near_ties(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest margin between the likeliest token and the one found, in deviations of a row."""
    chosen = expected.gather(1, found.argmax(-1, keepdim=True))[:, 0]
    return float(((expected.amax(-1) - chosen) / expected.std(-1)).max())


@pytest.mark.parametrize("kind", OURS)
def test_a_prompt_in_chunks_and_decodes_give_the_librarys_logits(directories: Directories, kind: str) -> None:
    tokens = prompt(200)
    one = chain(directories[kind])
    assert isinstance(device_stage(one.stages[0]).model, DeviceDecoder)
    parts = [tokens[:90], tokens[90:160], *([token] for token in tokens[160:])]
    found = torch.cat([one.run((0, part))[0] for part in parts])
    expected = reference(directories[kind], tokens)
    assert found.dtype == torch.float32
    assert not found.is_cuda
    assert error_of(found, expected) <= TOLERANCE
    assert near_ties(found, expected) <= 0.1


@pytest.mark.parametrize("kind", ["odd", "mistral", "qwen3"])
def test_mixed_rows_of_sequences_do_not_feel_each_other(directories: Directories, kind: str) -> None:
    one = chain(directories[kind])
    texts = {sequence: prompt(60, seed=sequence) for sequence in range(5)}
    found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in texts}
    for rows in ({0: 20, 1: 33}, {0: 1, 2: 40, 1: 1}, {0: 1, 1: 1, 2: 1}, {3: 7, 4: 60}, {3: 1, 0: 1, 2: 1}):
        starts = {s: sum(len(part) for part in found[s]) for s in rows}
        batch = [(s, texts[s][starts[s] : starts[s] + count]) for s, count in rows.items()]
        for (sequence, _), logits in zip(batch, one.run(*batch), strict=True):
            found[sequence].append(logits)
    for sequence, parts in found.items():
        logits = torch.cat(parts)
        expected = reference(directories[kind], texts[sequence][: len(logits)])
        assert error_of(logits, expected) <= TOLERANCE


@pytest.mark.parametrize("kind", LIBRARYS)
def test_layers_of_the_library_compute_what_it_computes(directories: Directories, kind: str) -> None:
    tokens = prompt(70)
    spec = ModelSource.resolve(str(directories[kind])).spec
    cut = next(cut for cut in (2, 1) if cut not in spec.forbidden_cuts)
    one = chain(directories[kind], cut, kernel=CHECK_KERNEL)
    parts = [tokens[:40], tokens[40:66], *([token] for token in tokens[66:])]
    found = torch.cat([one.run((0, part))[0] for part in parts])
    assert error_of(found, reference(directories[kind], tokens)) <= 1e-4


@pytest.mark.parametrize("kind", LIBRARYS)
def test_layers_of_the_library_run_in_bfloat16(directories: Directories, kind: str) -> None:
    tokens = prompt(70)
    one = chain(directories[kind])
    parts = [tokens[:40], tokens[40:66], *([token] for token in tokens[66:])]
    found = torch.cat([one.run((0, part))[0] for part in parts])
    expected = reference(directories[kind], tokens)
    # where two experts are nearly as good, rounding chooses another: those rows differ, and few are
    errors = torch.tensor([error_of(a, b) for a, b in zip(found, expected, strict=True)])
    assert float((errors <= 4 * TOLERANCE).float().mean()) >= 0.8
    assert float(errors.median()) <= 2 * TOLERANCE


@pytest.mark.parametrize("kind", ["even", "gpt_oss"])
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_route_may_have_stages_on_host_and_device(
    directories: Directories, kind: str, devices: Sequence[str]
) -> None:
    tokens = prompt(60)
    one = chain(directories[kind], 3, kernel=CHECK_KERNEL if kind == "gpt_oss" else KERNEL, devices=devices)
    found = torch.cat([one.run((0, part))[0] for part in (tokens[:50], tokens[50:59], tokens[59:])])
    assert error_of(found, reference(directories[kind], tokens)) <= TOLERANCE


def test_a_cut_changes_nothing(directories: Directories) -> None:
    tokens = prompt(50)
    parts = [tokens[:40], *([token] for token in tokens[40:])]
    whole, cut = chain(directories["even"]), chain(directories["even"], 2, 3)
    for part in parts:
        assert torch.equal(whole.run((0, part))[0], cut.run((0, part))[0])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_a_captured_decode_is_the_decode(directories: Directories, count: int) -> None:
    captured, eager = chain(directories["qwen3"]), chain(directories["qwen3"], captured=False)
    texts = {sequence: prompt(30 + sequence, seed=sequence) for sequence in range(count)}
    for one in (captured, eager):
        one.run(*((s, text[:-6]) for s, text in texts.items()))
    for place in range(-6, 0):
        rows = [(s, [text[place]]) for s, text in texts.items()]
        pairs = zip(captured.run(*rows), eager.run(*rows), strict=True)
        assert all(error_of(found, expected) <= TOLERANCE for found, expected in pairs)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_captured_decode_of_a_family_is_the_decode(directories: Directories, kind: str, count: int) -> None:
    captured = chain(directories[kind], kernel=CHECK_KERNEL)
    eager = chain(directories[kind], kernel=CHECK_KERNEL, captured=False)
    assert device_stage(captured.stages[0]).captured
    texts = {sequence: prompt(30 + sequence, seed=sequence) for sequence in range(count)}
    for one in (captured, eager):
        one.run(*((s, text[:-6]) for s, text in texts.items()))
    for place in range(-6, 0):
        rows = [(s, [text[place]]) for s, text in texts.items()]
        pairs = zip(captured.run(*rows), eager.run(*rows), strict=True)
        assert all(error_of(found, expected) <= 1e-5 for found, expected in pairs)


def test_a_state_that_another_sequence_left_changes_nothing(directories: Directories) -> None:
    one, other = (chain(directories["qwen3_5"], kernel=CHECK_KERNEL) for _ in range(2))
    one.run((0, prompt(40)))
    one.release(0)
    text = prompt(50, seed=1)
    for part in (text[:7], text[7:40], *([token] for token in text[40:])):
        (found,), (expected,) = one.run((1, part)), other.run((1, part))
        assert error_of(found, expected) <= 1e-5


def test_a_copied_state_goes_on_as_its_source(directories: Directories) -> None:
    one, other = (chain(directories["qwen3_5"], kernel=CHECK_KERNEL) for _ in range(2))
    text = prompt(40)
    group = next(i for i, found in enumerate(one.rings) if found == 1)
    for run in (one, other):
        run.run((0, text[:32]))
    (old,) = one.tables[0][group]
    grant = BlockGrant(0, group, [(old + 1) % one.num_blocks], b"", 0)
    one.stages[0].apply(Step(1 << 20, [], [grant], [], b""))
    (found,), (expected,) = one.run((0, text[32:])), other.run((0, text[32:]))
    assert error_of(found, expected) <= 1e-5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_stages_of_one_process_may_lie_on_several_devices(directories: Directories) -> None:
    tokens = prompt(60)
    one, two = chain(directories["qwen3"]), chain(directories["qwen3"], 2, devices=("cuda:1", "cuda:0"))
    for part in (tokens[:50], tokens[50:59], tokens[59:]):
        assert torch.equal(one.run((0, part))[0], two.run((0, part))[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_one_stage_may_lie_on_several_devices(directories: Directories) -> None:
    tokens = prompt(60)
    one, two = chain(directories["qwen3"]), chain(directories["qwen3"], devices=("cuda:0,cuda:1",))
    (several,) = two.stages
    assert isinstance(several, SeveralStages)
    assert [part.device.index for part in several.parts] == [0, 1]
    assert several.weight_bytes == device_stage(one.stages[0]).weight_bytes
    for part in (tokens[:50], tokens[50:59], tokens[59:]):
        assert torch.equal(one.run((0, part))[0], two.run((0, part))[0])
    assert several.room_bytes(1 << 34) > 0


def test_what_is_left_for_blocks_is_measured_and_true(directories: Directories) -> None:
    stage = device_stage(chain(directories["even"]).stages[0])
    offered = 1 << 32
    room = stage.room_bytes(offered)
    assert 0 < room < offered - stage.weight_bytes
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    stage.make_pools(room // sum(stage.block_bytes))
    assert stage.capture(256)
    stage.rehearse(2048)
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] <= 1.05 * (offered - stage.weight_bytes)


def test_rows_are_sampled_on_the_device_and_scored_tokens_from_their_logits(directories: Directories) -> None:
    one = chain(directories["odd"])
    stage = device_stage(one.stages[0])
    hidden = torch.randn(5, stage.hidden_size, generator=torch.Generator().manual_seed(3))
    warm = SamplingParams(temperature=0.8, seed=7)
    jobs = [GREEDY, SampleJob(warm, 0, 9), GREEDY, SampleJob(warm, 1, 9, score=4), GREEDY]
    found = stage.sample(hidden, jobs)
    assert found.here == (0, 1, 2, 4)
    assert found.outcomes() == sample_all(stage.output(hidden).numpy(), jobs)
    broken = hidden.clone()
    broken[2] = float("nan")
    errors = [outcome.error for outcome in stage.sample(broken, [GREEDY] * 5).outcomes()]
    assert [error is not None for error in errors] == [False, False, True, False, False]


def test_blocks_that_are_read_can_be_written_elsewhere(directories: Directories) -> None:
    one, other = chain(directories["odd"]), chain(directories["odd"])
    one.run((0, prompt(32)))
    (blocks,) = one.tables[0]
    kv = one.stages[0].read_blocks(0, 5, blocks)
    assert kv.shape == (5, 2, 32, 2, 8)
    assert kv.dtype == torch.float32
    other.stages[0].write_blocks(0, [7, 3], [bytes(16), bytes(16)], kv)
    assert torch.equal(other.stages[0].read_blocks(0, 5, [7, 3]), kv)
    assert kv.abs().sum() > 0


def test_what_makes_no_sense_is_refused_before_anything_changes(directories: Directories) -> None:
    one = chain(directories["odd"], 2)
    step = Step(0, [], [BlockGrant.append(0, 0, [1])], [Row(0, 0, 3, 3)], b"")
    for tokens in (None, torch.tensor([1, 2]), torch.tensor([1, 2, 105])):
        with pytest.raises(StepError):
            one.stages[0].run(step, None, tokens)
    with pytest.raises(StepError, match="hidden state"):
        one.stages[1].run(step, torch.zeros(3, 41), None)
    one.stages[0].run(step, None, torch.tensor([1, 2, 3]))


def test_a_layer_lies_on_the_device_and_what_is_kept_is_not_read_again(directories: Directories) -> None:
    source = ModelSource.resolve(str(directories["odd"]))
    first = device_stage(chain(directories["odd"], 2).stages[1])
    assert first.weight_bytes < 2 * sum(t.num_bytes for t in source.tensors.values())
    assignment = StageAssignment("m", 1, 5, embed=False, output=True)
    second = CudaStage.load(
        *(source, assignment),
        device="cuda",
        kernel=KERNEL,
        block_size=16,
        require_tags=False,
        before=first,
    )
    layer = sum(t.num_bytes for name, t in source.tensors.items() if name.startswith("model.layers.1."))
    assert layer <= second.bytes_read < 2 * layer + source.tensors["model.embed_tokens.weight"].num_bytes


def test_a_device_that_is_not_there_is_named() -> None:
    assert check_device("cuda").index == 0
    for name in ("cuda:99", "mps", "nonsense"):
        with pytest.raises(ModelError, match=name):
            check_device(name)
