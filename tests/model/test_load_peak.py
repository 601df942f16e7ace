"""The most memory that loading takes, in a process of its own: what stays, a fifth more, and 256 MiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from convoy.model.source import ModelSource
from convoy.plan.spec import ModelSpec

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
from convoy.model.source import ModelSource
from convoy.model.stage import Stage, StageOptions
from convoy.wire.messages import StageAssignment
options, path, end = StageOptions(kernel=sys.argv[1]), sys.argv[2], int(sys.argv[3])
Stage.load(ModelSource.resolve("demo-mini"), StageAssignment("a", 0, 1, True, False), options)
before, most, over = anonymous(), 0, threading.Event()
def watch():
    global most
    while not over.wait(0.002):
        most = max(most, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
stage = Stage.load(ModelSource.resolve(path), StageAssignment("a", 0, end, True, True), options)
over.set()
watcher.join()
print(json.dumps([before, most, stage.weight_bytes]))
"""


def write_model(path: Path, family: str) -> ModelSpec:
    """Drawn weights of a family's shapes, in bfloat16, as a checkpoint has them."""
    config = {"model_type": family, **COMMON, **LARGE[family]}
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


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux does")
@pytest.mark.parametrize("kernel", ["plain-f32", "exact-f32"])
@pytest.mark.parametrize("family", sorted(LARGE))
def test_loading_takes_little_more_than_what_stays(tmp_path: Path, family: str, kernel: str) -> None:
    spec = write_model(tmp_path / family, family)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, kernel, str(tmp_path / family), str(spec.num_layers)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, most, held = json.loads(done.stdout)
    planned = spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype=kernel)
    assert abs(planned - held) <= 0.05 * held
    assert held > 3 * ALLOWED_BYTES, "large enough for a second copy to show"
    assert most - before <= 1.2 * held + ALLOWED_BYTES
