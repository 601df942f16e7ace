"""The cost of each quantised format, and of each dtype of K/V, for a trained model: tables of docs/models.md.

    PYTHONPATH=src:tests python -m support.format_errors

Quantises the bundled `demo` with the writers of `support.quantised_models`, which round to the nearest
and use no calibration, loads both through our stages, and compares the logits of the certificate's eight
texts.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import torch
import transformers

from convoy.config.kernels import CUDA_KERNELS, EXACT
from convoy.evaluate.prompts import TEXTS
from convoy.model.backends.registry import load_stage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.quantize.checkpoint import quantize
from convoy.model.quantize.record import FORMATS as QUANTIZE_FORMATS
from convoy.model.stage import StageOptions
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import StageAssignment
from support.quantised_models import (
    Quantise,
    Writer,
    Written,
    awq,
    compressed,
    compressed_float8,
    fp8,
    gptq,
    mlx,
    save_written,
    write_gguf,
)
from support.tiny_models import Chain

FORMATS: dict[str, Quantise] = {
    "MLX 4-bit, groups of 64": mlx(4, 64),
    "MLX 8-bit, groups of 64": mlx(8, 64),
    "FP8, squares of 128": fp8((128, 128)),
    "FP8, a scale for each row (compressed-tensors)": compressed_float8,
    "compressed-tensors int4, groups of 32": compressed(4, 32),
    "compressed-tensors int8, rows": compressed(8, None),
    "GPTQ 4-bit, groups of 128": gptq(4, 128),
    "AWQ 4-bit, groups of 128": awq(128),
}
GGUF = ("Q8_0", "Q5_1", "Q4_0")
KV_DTYPES = ("bf16", "f16", "q8")


def main() -> None:
    """Print the table."""
    source = ModelSource.resolve("demo")
    texts = [Tokenizer(source).encode(text) for text in TEXTS]
    expected = _logits(source, texts)
    print(f"logits reach {expected.abs().max():.0f}, {len(expected)} positions")
    for kv_dtype in KV_DTYPES:
        options = StageOptions(require_tags=False, kv_dtype=kv_dtype)
        num_bytes = source.spec.with_kv_dtype(kv_dtype).kv_token_bytes(0, source.spec.num_layers, EXACT)
        found, _ = _logits_and_bytes(source, texts, options)
        _say(f"K/V in {kv_dtype}", f"{num_bytes / 1e3:.2f} kB", found, expected, digits=5)
    for kernel in CUDA_KERNELS if torch.cuda.is_available() else ():
        found, num_bytes = _logits_and_bytes(
            source, texts, StageOptions(kernel, device="cuda:0", require_tags=False)
        )
        _say(f"{kernel}, on the device", f"{num_bytes / 1e6:.1f} MB", found, expected)
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, quantise) in enumerate(FORMATS.items()):
            model = transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
            written = save_written(Path(folder) / str(number), Writer(model), quantise)
            _report(name, written, expected, texts)
        for form in QUANTIZE_FORMATS:
            made = quantize(source, form, Path(folder) / form).folder
            _report(f"`convoy quantize`, {form}", Written(made, made), expected, texts)
        for kind in GGUF:
            _report(f"GGUF {kind}", write_gguf(Path(folder) / kind, Writer(model), kind), expected, texts)


def _report(name: str, written: Written, expected: torch.Tensor, texts: list[list[int]]) -> None:
    quantised = ModelSource.resolve(str(written.quantised))
    stored_bytes = sum(tensor.num_bytes for tensor in quantised.tensors.values())
    found = _logits(quantised, texts)
    _say(name, f"{stored_bytes / 1e6:.1f} MB", found, expected)


def _say(name: str, size: str, found: torch.Tensor, expected: torch.Tensor, digits: int = 3) -> None:
    error = found - expected
    share = error.pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    worst = error.abs().amax(-1)
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    print(
        f"| {name} | {size} | {share:.{digits}f} | {worst.max():.{digits - 1}f} "
        f"| {worst.median():.{digits - 1}f} | {100 * same:.1f} % |"
    )


def _logits(source: ModelSource, texts: list[list[int]]) -> torch.Tensor:
    return _logits_and_bytes(source, texts, StageOptions(require_tags=False))[0]


def _logits_and_bytes(
    source: ModelSource, texts: list[list[int]], options: StageOptions
) -> tuple[torch.Tensor, int]:
    assignment = StageAssignment("m", 0, source.spec.num_layers, True, True)
    stage = load_stage(source, assignment, options)
    parts = (Chain([stage]).run((number, text)) for number, text in enumerate(texts))
    return torch.cat(list(itertools.chain.from_iterable(parts))), stage.weight_bytes


if __name__ == "__main__":
    main()
