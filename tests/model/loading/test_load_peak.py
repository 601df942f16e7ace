"""The most memory that loading takes, in a process of its own: what stays, a fifth more, and 256 MiB.

Exact mode takes no fifth more, because these files are in bfloat16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convoy.config.kernels import EXACT_KERNELS
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.linear import packed_available
from convoy.model.kernels.native.library import keeps_stored
from convoy.plan.span import Span
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.sharding import rank_bytes

needs_status = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="counts memory as Linux does"
)
ALLOWED_BYTES = 256 << 20
LARGE: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 5632, "num_hidden_layers": 10},
    "qwen3_moe": {
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
    },
    "gemma3_text": {"intermediate_size": 5632, "num_hidden_layers": 10, "sliding_window": 512},
}
COMMON = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 8000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LOAD = """
import json, sys, threading
from pathlib import Path
def anonymous():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
from convoy.model.kernels.linear import packed_available
from convoy.model.checkpoints.source import ModelSource
from convoy.model.backends.host.stage import HostStage
from convoy.model.stage import StageOptions
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import StageAssignment
options, path, end = StageOptions(kernel=sys.argv[1]), sys.argv[2], int(sys.argv[3])
shard = Shard(1, int(sys.argv[4])) if sys.argv[4:] else None
HostStage.load(ModelSource.resolve("demo-mini"), StageAssignment("a", 0, 1, True, False), options)
before, most, over = anonymous(), 0, threading.Event()
def watch():
    global most
    while not over.wait(0.002):
        most = max(most, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
whole = StageAssignment("a", 0, end, True, True)
stage = HostStage.load(ModelSource.resolve(path), whole, options, shard=shard)
over.set()
watcher.join()
print(json.dumps([before, most, stage.weight_bytes]))
"""


def write_model(path: Path, family: str, **changes: Any) -> ModelSpec:
    """Drawn weights of a family's shapes, in bfloat16, as a checkpoint has them."""
    config = {"model_type": family, **COMMON, **LARGE[family], **changes}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    import transformers

    with torch.device("meta"):
        loader: Any = transformers.AutoModelForCausalLM
        model = loader.from_config(transformers.AutoConfig.from_pretrained(path))
    tensors = {
        name: torch.full(tensor.shape, 0.01, dtype=torch.bfloat16)
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return ModelSource.resolve(str(path)).spec


def write_mlx(path: Path, bits: int = 4) -> ModelSpec:
    """A Llama as `mlx_lm.convert` writes it: some bits for each weight, a scale and a bias for 64 of them."""
    group = 64
    write_model(path, "llama", num_hidden_layers=18)
    stored = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if tensor.ndim == 1:
            stored[name] = tensor
            continue
        outputs, inputs = tensor.shape
        words = torch.full((outputs, inputs * bits // 32), 0x12345678, dtype=torch.int32)
        stored[name] = words.view(torch.uint32)
        module = name.removesuffix(".weight")
        for what, value in (("scales", 0.01), ("biases", -0.07)):
            stored[f"{module}.{what}"] = torch.full((outputs, inputs // group), value, dtype=torch.bfloat16)
    save_file(stored, path / "model.safetensors", metadata={"format": "mlx"})
    config = json.loads((path / "config.json").read_text("utf-8"))
    config["quantization"] = {"bits": bits, "group_size": group}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelSource.resolve(str(path)).spec


def most_share(kernel: str) -> float:
    """What a kernel may take of what stays: matrices in the form of their file are never there twice."""
    return 1.0 if kernel in EXACT_KERNELS else 1.2


def assert_peak(path: Path, spec: ModelSpec, kernel: str) -> None:
    before, most, held = loaded(path, kernel, spec)
    planned = spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype=kernel)
    assert abs(planned - held) <= 0.05 * held
    assert held > 3 * ALLOWED_BYTES, "large enough for a second copy to show"
    assert most - before <= most_share(kernel) * held + ALLOWED_BYTES


@pytest.mark.long
@needs_status
@pytest.mark.parametrize("kernel", ["plain-f32", "exact-f32"])
@pytest.mark.parametrize("family", sorted(LARGE))
def test_loading_takes_little_more_than_what_stays(tmp_path: Path, family: str, kernel: str) -> None:
    assert_peak(tmp_path / family, write_model(tmp_path / family, family), kernel)


@pytest.mark.long
@needs_status
@pytest.mark.skipif(not keeps_stored(), reason="nothing is compiled here, so all is unpacked")
def test_a_file_of_3_bits_is_packed_matrix_by_matrix(tmp_path: Path) -> None:
    """It is unpacked by tiles; 370 MB stay, as in the file."""
    spec = write_mlx(tmp_path / "mlx", bits=3)
    before, most, held = loaded(tmp_path / "mlx", "exact-f32", spec)
    assert ALLOWED_BYTES < held <= 1.08 * (tmp_path / "mlx" / "model.safetensors").stat().st_size
    assert most - before <= held + ALLOWED_BYTES


@pytest.mark.long
@needs_status
@pytest.mark.skipif(not packed_available(), reason="no packed linears here")
@pytest.mark.parametrize(
    ("kernel", "tied"),
    [
        *((kernel, False) for kernel in ("exact-f32", "exact-q4", "plain-f32")),
        *((kernel, True) for kernel in ("exact-f32", "exact-q8")),
    ],
)
def test_the_output_of_a_large_vocabulary_is_never_there_twice(
    tmp_path: Path, kernel: str, tied: bool
) -> None:
    """Embedding and output are nearly all of this model, 501 MB each in float32."""
    shape = {"hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 8}
    small = {"num_hidden_layers": 1, "vocab_size": 128_256, "tie_word_embeddings": tied}
    spec = write_model(tmp_path / "wide", "llama", **shape, **small)
    before, most, held = loaded(tmp_path / "wide", kernel, spec)
    planned = spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype=kernel)
    assert abs(planned - held) <= 0.05 * held
    assert most - before <= most_share(kernel) * held + ALLOWED_BYTES


@pytest.mark.long
@needs_status
def test_a_rank_takes_little_more_than_its_slices(tmp_path: Path) -> None:
    spec = write_model(tmp_path / "llama", "llama", num_hidden_layers=20)
    before, most, held = loaded(tmp_path / "llama", "exact-f32", spec, "2")
    assert held == rank_bytes(spec, Span(0, spec.num_layers, output=True), "exact-f32", 2)
    assert held > 3 * ALLOWED_BYTES, "large enough for a second copy to show"
    assert most - before <= held + ALLOWED_BYTES


def loaded(path: Path, kernel: str, spec: ModelSpec, *ranks: str) -> tuple[int, int, int]:
    """Bytes before, at most while it loads, and of the weights, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, kernel, str(path), str(spec.num_layers), *ranks],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, most, held = json.loads(done.stdout)
    return before, most, held
