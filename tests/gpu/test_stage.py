"""A CUDA stage against the whole model of transformers, and against itself: cut, chunked, captured or not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from convoy.errors import ModelError, StepError
from convoy.model.source import ModelSource
from convoy.wire.messages import BlockGrant, Row, StageAssignment, Step
from support.kernels import error_of, why_not
from support.tiny_models import build_model

if why_not() is not None or not torch.cuda.is_available():
    pytest.skip(why_not() or "no CUDA device", allow_module_level=True)

from convoy.model.gpu.stage import KERNEL, CudaStage, check_device

pytestmark = pytest.mark.gpu
# of bfloat16 through five layers, against float32: of the logits' norm
TOLERANCE = 3e-2
KINDS = ("odd", "even", "mistral", "qwen2", "qwen3")
NUM_BLOCKS = 96


class Chain:
    """Stages joined in one process, with blocks handed out in a scattered order."""

    def __init__(self, stages: Sequence[CudaStage], num_groups: int) -> None:
        self.stages = stages
        self._num_groups = num_groups
        self._free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
        self._lengths: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self._numbers = itertools.count()
        for stage in stages:
            stage.make_pools(NUM_BLOCKS)

    def run(self, *rows: tuple[int, Sequence[int]]) -> list[torch.Tensor]:
        """Logits [n, vocab] of each (sequence, tokens) row."""
        grants, wire_rows = [], []
        for sequence, tokens in rows:
            first = self._lengths.get(sequence, 0)
            table = self._tables.setdefault(sequence, [])
            missing = -(-(first + len(tokens)) // 16) - len(table)
            if missing > 0:
                blocks = [self._free.pop() for _ in range(missing)]
                table.extend(blocks)
                grants += [BlockGrant(sequence, group, blocks) for group in range(self._num_groups)]
            wire_rows.append(Row(sequence, first, len(tokens), len(tokens)))
            self._lengths[sequence] = first + len(tokens)
        step = Step(next(self._numbers), [], grants, wire_rows, b"")
        hidden: torch.Tensor | None = None
        for stage in self.stages:
            ids = torch.tensor([t for _, part in rows for t in part]) if stage.assignment.embed else None
            hidden = stage.run(step, hidden, ids)
        assert hidden is not None
        logits = self.stages[-1].output(self.stages[-1].select(step, hidden))
        return list(torch.split(logits, [row.num_tokens for row in wire_rows]))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gpu")
    for kind in KINDS:
        build_model(kind).to(torch.bfloat16).save_pretrained(root / kind)
    return {kind: root / kind for kind in KINDS}


def chain(directory: Path, *cuts: int, captured: bool = True) -> Chain:
    source = ModelSource.resolve(str(directory))
    limits = [0, *cuts, source.spec.num_layers]
    stages = []
    for i, (start, end) in enumerate(itertools.pairwise(limits)):
        assignment = StageAssignment(f"m{i}", start, end, embed=i == 0, output=i == len(limits) - 2)
        stage = CudaStage.load(
            *(source, assignment), device="cuda", kernel=KERNEL, block_size=16, require_tags=False
        )
        stage.captured = captured
        stages.append(stage)
    return Chain(stages, len(source.spec.cache_groups))


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 105, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(directory: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of transformers, eager attention, float32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


def near_ties(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest margin of ``expected`` between its likeliest token and the one found, in its deviation."""
    chosen = expected.gather(1, found.argmax(-1, keepdim=True))[:, 0]
    return float(((expected.amax(-1) - chosen) / expected.std(-1)).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chunks_and_decodes_give_the_librarys_logits(
    directories: dict[str, Path], kind: str
) -> None:
    tokens = prompt(200)
    one = chain(directories[kind])
    parts = [tokens[:90], tokens[90:160], *([token] for token in tokens[160:])]
    found = torch.cat([one.run((0, part))[0] for part in parts])
    expected = reference(directories[kind], tokens)
    assert found.dtype == torch.float32
    assert not found.is_cuda
    assert error_of(found, expected) <= TOLERANCE
    assert near_ties(found, expected) <= 0.1


@pytest.mark.parametrize("kind", ["odd", "mistral", "qwen3"])
def test_mixed_rows_of_sequences_do_not_feel_each_other(directories: dict[str, Path], kind: str) -> None:
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


def test_a_cut_changes_nothing(directories: dict[str, Path]) -> None:
    tokens = prompt(50)
    parts = [tokens[:40], *([token] for token in tokens[40:])]
    whole, cut = chain(directories["even"]), chain(directories["even"], 2, 3)
    for part in parts:
        assert torch.equal(whole.run((0, part))[0], cut.run((0, part))[0])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_a_captured_decode_is_the_decode(directories: dict[str, Path], count: int) -> None:
    captured, eager = chain(directories["qwen3"]), chain(directories["qwen3"], captured=False)
    texts = {sequence: prompt(30 + sequence, seed=sequence) for sequence in range(count)}
    for one in (captured, eager):
        one.run(*((s, text[:-6]) for s, text in texts.items()))
    for place in range(-6, 0):
        rows = [(s, [text[place]]) for s, text in texts.items()]
        pairs = zip(captured.run(*rows), eager.run(*rows), strict=True)
        assert all(error_of(found, expected) <= TOLERANCE for found, expected in pairs)


def test_blocks_that_are_read_can_be_written_elsewhere(directories: dict[str, Path]) -> None:
    one, other = chain(directories["odd"]), chain(directories["odd"])
    one.run((0, prompt(32)))
    blocks = one._tables[0]
    kv = one.stages[0].read_blocks(0, 5, blocks)
    assert kv.shape == (5, 2, 32, 2, 8)
    assert kv.dtype == torch.float32
    other.stages[0].write_blocks(0, [7, 3], [bytes(16), bytes(16)], kv)
    assert torch.equal(other.stages[0].read_blocks(0, 5, [7, 3]), kv)
    assert kv.abs().sum() > 0


def test_what_makes_no_sense_is_refused_before_anything_changes(directories: dict[str, Path]) -> None:
    one = chain(directories["odd"], 2)
    step = Step(0, [], [BlockGrant(0, 0, [1])], [Row(0, 0, 3, 3)], b"")
    for tokens in (None, torch.tensor([1, 2]), torch.tensor([1, 2, 105])):
        with pytest.raises(StepError):
            one.stages[0].run(step, None, tokens)
    with pytest.raises(StepError, match="hidden state"):
        one.stages[1].run(step, torch.zeros(3, 41), None)
    one.stages[0].run(step, None, torch.tensor([1, 2, 3]))


def test_a_layer_lies_on_the_device_and_what_is_kept_is_not_read_again(directories: dict[str, Path]) -> None:
    source = ModelSource.resolve(str(directories["odd"]))
    first = chain(directories["odd"], 2).stages[1]
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
