"""Train the bundled models from generated text, on a GPU in minutes or (for a try) on a CPU.

    python training/train.py --out build/models --minutes 8
    python training/train.py --device cpu --steps 50 --batch-tokens 4096 --out build/models

All models named train in one process on the same batches. The learning rate warms up and then falls along a
cosine to zero at `--steps` or `--minutes`, whichever is given; with minutes the number of steps is what the
machine manages. Weights are kept in float32, computed under bf16 autocast on CUDA, and saved in bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The loader's workers fork, which does not go with the tokenizer's threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AttentionInterface, AutoTokenizer, LlamaForCausalLM

from batches import Batches
from questions import KINDS
from score import load_questions, score_questions, score_sums
from shapes import SIZES, generation_config, llama_config

MODELS = Path(__file__).resolve().parent.parent / "src" / "convoy" / "models"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PEAK_RATES = {"demo": 2.0e-3, "demo-mini": 3.0e-3}
WARM_UP_STEPS = 300
WEIGHT_DECAY = 0.05


@dataclass
class Pupil:
    """Hold a model in training."""

    name: str
    model: LlamaForCausalLM
    optimiser: torch.optim.AdamW
    peak_rate: float
    loss: float = math.nan


def make_pupil(name: str, options: argparse.Namespace) -> Pupil:
    """Return a fresh model, or one that continues from `--resume`/name."""
    torch.manual_seed(options.seed)
    if options.resume:
        model = LlamaForCausalLM.from_pretrained(options.resume / name, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(llama_config(name))
    model.set_attn_implementation("causal")
    model.to(options.device)
    if options.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    rate = PEAK_RATES[name] * options.rate_scale
    fused = options.device == "cuda"
    return Pupil(name, model, torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.97), fused=fused), rate)


def causal_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, scaling: float, **__: object
) -> tuple[Tensor, None]:
    """Compute full causal attention over whole rows: [rows, heads, tokens, 32] -> [rows, tokens, heads, 32].

    Keys and values are repeated for their query heads, and all three have one type. So the flash kernel can
    run.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def weighted_loss(model: LlamaForCausalLM, batch: Tensor, counted: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy of the tokens that count. Only these positions get logits.

    `batch` is [rows, 2, tokens]: ids, and weights in hundredths. `counted` are flat positions, see `Batches`.
    """
    ids = batch[:, 0].long()
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets, weights = ids[:, 1:].flatten()[counted], batch[:, 1, 1:].flatten()[counted].float()
    logits = model.lm_head(hidden.flatten(0, 1)[counted]).float()
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def learn(pupil: Pupil, batch: Tensor, counted: Tensor, rate_factor: float, *, bf16: bool) -> Tensor:
    """Run one optimiser step. Return the loss without waiting for the device."""
    for group in pupil.optimiser.param_groups:
        group["lr"] = pupil.peak_rate * rate_factor
    with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=bf16):
        loss = weighted_loss(pupil.model, batch, counted)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(pupil.model.parameters(), 1.0)
    pupil.optimiser.step()
    pupil.optimiser.zero_grad(set_to_none=True)
    return loss.detach()


def save(pupil: Pupil, out: Path, record: dict[str, object]) -> Path:
    """Write the whole model folder in bf16, and training.json beside it (the card's figures)."""
    folder = out / pupil.name
    folder.mkdir(parents=True, exist_ok=True)
    copy: Any = LlamaForCausalLM(llama_config(pupil.name))
    copy.load_state_dict(pupil.model.state_dict())
    copy.generation_config = generation_config()
    copy.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (MODELS / pupil.name).resolve() != folder.resolve():
            shutil.copy(MODELS / pupil.name / name, folder / name)
    (out / f"{pupil.name}-training.json").write_text(
        json.dumps(record | {"loss": pupil.loss}, indent=2) + "\n"
    )
    return folder


def report(folder: Path, device: str, num_questions: int) -> None:
    """Score the saved files (float32 compute, bf16 weights) on the training device and print the table."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device).eval()
    questions = load_questions(MODELS / "questions.jsonl")
    chosen = questions[:: max(1, len(questions) // num_questions)]
    kinds, misses = score_questions(model, tokenizer, chosen)
    sums = {name: score_sums(model, tokenizer, name) for name in ("plain", "spaces", "system")}
    shown = " ".join(f"{kind} {right}/{asked}" for kind, (right, asked) in kinds.items())
    print(f"  {folder.name}: {shown} | sums {sums}", flush=True)
    for question, given in misses[:12]:
        print(f"    {question['kind']}: {question['question']!r} wanted {question['answer']!r} got {given!r}")


def rate_at(step: int, progress: float) -> float:
    """Return the share of the peak rate: linear warm-up, then a cosine to zero."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def _record(options: argparse.Namespace, step: int, seconds: float) -> dict[str, object]:
    return {
        "steps": step,
        "seconds": round(seconds, 1),
        "batch_tokens": options.batch_tokens,
        "peak_rates": PEAK_RATES,
        "rate_scale": options.rate_scale,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "resumed": bool(options.resume),
        "practice": list(options.practice),
        "seed": options.seed,
    }


def _log(pupils: list[Pupil], losses: dict[str, Tensor], line: str) -> None:
    """Smooth the losses and print them; this is the only place where the loop waits for the device."""
    for pupil in pupils:
        latest = losses[pupil.name].item()
        pupil.loss = latest if math.isnan(pupil.loss) else 0.7 * pupil.loss + 0.3 * latest
    print(line, " ".join(f"{pupil.name} {pupil.loss:.4f}" for pupil in pupils), flush=True)


def train(options: argparse.Namespace) -> None:
    """Train all models to the end, and save and score them on the way."""
    torch.set_float32_matmul_precision("high")
    AttentionInterface.register("causal", causal_attention)
    pupils = [make_pupil(name, options) for name in options.models]
    data = Batches(
        MODELS / "demo" / "tokenizer.json", options.batch_tokens, options.seed, tuple(options.practice)
    )
    ahead = {"num_workers": options.workers, "prefetch_factor": 8} if options.workers else {}
    loader = iter(DataLoader(data, batch_size=None, pin_memory=options.device == "cuda", **ahead))
    began, step, progress, waited = time.monotonic(), 0, 0.0, 0.0
    checks = [0.4, 0.75, 2.0]
    losses: dict[str, Tensor] = {}
    while progress < 1.0:
        asked_at = time.monotonic()
        batch, counted = (part.to(options.device, non_blocking=True) for part in next(loader))
        waited += time.monotonic() - asked_at
        for pupil in pupils:
            factor = rate_at(step, progress)
            losses[pupil.name] = learn(pupil, batch, counted, factor, bf16=options.device == "cuda")
        step += 1
        elapsed = time.monotonic() - began
        progress = step / options.steps if options.steps else elapsed / (60 * options.minutes)
        finished = progress >= 1.0
        if step % options.log_every == 0 or finished:
            speed = step * options.batch_tokens / elapsed
            _log(pupils, losses, f"step {step} {elapsed:.0f} s (data {waited:.0f} s) {speed:.0f} tokens/s")
        if finished or progress >= checks[0]:
            checks = checks if finished else checks[1:]
            record = _record(options, step, time.monotonic() - began)
            for pupil in pupils:
                folder = save(pupil, options.out, record)
                # Scoring a half-trained model takes too long on a CPU.
                if options.device == "cuda" or finished:
                    report(folder, options.device, 400 if options.device == "cuda" and finished else 80)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that receives one folder per model")
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="stop after so long, where no steps are given"
    )
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument(
        "--workers", type=int, default=0 if (os.cpu_count() or 1) < 4 else (os.cpu_count() or 1) - 2
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="folder with one folder per model to go on from")
    parser.add_argument(
        "--practice", nargs="*", choices=tuple(KINDS), default=(), help="kinds to practise more"
    )
    parser.add_argument("--rate-scale", type=float, default=1.0, help="multiplies the peak learning rates")
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="compile the layers with torch.compile")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
