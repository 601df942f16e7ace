"""Compare and time sampling on a CUDA device: ``python -m comparisons.cuda.draws FILE``.

Every row of random logits is drawn on the device and by the host's definition (`sampling.sample`). Tokens
must be equal but for rows that the device leaves to the host, which are counted. Then rows of a step are
timed: the device's time of all kernels, and the time of the thread that submits them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from convoy.model.backends.cuda.memory.staging import Staging
from convoy.model.backends.cuda.sampling import draw_tokens, score_tokens
from convoy.model.constraints.matcher import mask_bytes
from convoy.model.sampling.output_rows import SampleJob, sample_row
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.rows import params_of

WIDTH = 128_256
SHAPES = ("normal, deviation 3", "flat, deviation 0.1", "tied, whole numbers", "peaked", "all equal")
SETTINGS: dict[str, dict[str, object]] = {
    "temperature 1": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "mask": {},
    "logprobs 20": {"logprobs": 20},
}
_BATCH = 64


def draw_logits(shape: str, rows: int, width: int, seed: int) -> torch.Tensor:
    """Return random logits [rows, width] on the device."""
    random = torch.Generator("cuda").manual_seed(seed)
    found = torch.randn(rows, width, device="cuda", generator=random)
    if shape == "flat, deviation 0.1":
        return found * 0.1
    if shape == "tied, whole numbers":
        return (found * 3).round()
    if shape == "peaked":
        return found * 2 + 14 * (torch.rand(rows, width, device="cuda", generator=random) > 0.9999)
    return torch.zeros_like(found) if shape == "all equal" else found * 3


def draw_jobs(rows: int, width: int, seed: int) -> list[SampleJob]:
    """Return jobs with random settings."""
    random = np.random.default_rng(seed)
    return [_job(random, width, seed * rows + row) for row in range(rows)]


def _job(random: np.random.Generator, width: int, position: int) -> SampleJob:
    def ids(count: int) -> list[int]:
        found: list[int] = random.integers(0, width, count).tolist()
        return found

    chosen: dict[str, object] = {"temperature": float(random.choice([0.3, 0.7, 1, 1, 2]))}
    if random.random() < 0.5:
        chosen["top_k"] = int(random.choice([1, 5, 50, width // 3, 10**6]))
    if random.random() < 0.6:
        chosen["top_p"] = float(random.choice([0, 0.1, 0.9, 0.95, 0.999]))
    if random.random() < 0.3:
        chosen["min_p"] = float(random.choice([0.001, 0.05, 1]))
    if random.random() < 0.3:
        chosen |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    if random.random() < 0.2:
        chosen["logit_bias"] = {token: float(random.normal() * 3) for token in ids(20)}
    return SampleJob(
        SamplingParams(seed=int(random.integers(2**40)), **chosen),  # type: ignore[arg-type]
        0,
        position,
        ids(200),
        ids(100),
        allowed=ids(50) if random.random() < 0.1 else (),
        banned=ids(4) if random.random() < 0.3 else (),
        mask=random.bytes(mask_bytes(width)) if random.random() < 0.1 else b"",
    )


def compare(num_rows: int, width: int, staging: Staging) -> dict[str, int]:
    """Return counts of rows: all, those that the host takes by status, and those with another token."""
    found: Counter[str] = Counter()
    with ThreadPoolExecutor(14) as pool:
        for number in range(-(-num_rows // _BATCH)):
            logits = draw_logits(SHAPES[number % len(SHAPES)], _BATCH, width, number)
            logits = logits.bfloat16() if number % 2 else logits
            jobs = draw_jobs(_BATCH, width, number)
            tokens, statuses = draw_tokens(logits, params_of(jobs, width), staging).tolist()
            expected = pool.map(sample_row, logits.float().cpu().numpy(), jobs)
            for token, status, result in zip(tokens, statuses, expected, strict=True):
                found["rows"] += 1
                if status:
                    found[f"status {status}"] += 1
                elif result.error is not None or token != result.sampled.token_id:
                    found["different"] += 1
    return dict(found)


def timed(rows: int, shape: str, setting: str, staging: Staging) -> dict[str, object]:
    """Return the median milliseconds of the device, and of the submitting thread, for a step of rows."""
    params = SamplingParams(seed=1, **SETTINGS[setting])  # type: ignore[arg-type]
    random = np.random.default_rng(1)
    mask = random.bytes(mask_bytes(WIDTH)) if setting == "mask" else b""
    said: list[int] = random.integers(0, WIDTH, 300).tolist()
    generated = said if setting == "penalties" else ()
    jobs = [SampleJob(params, 0, row, said, generated, mask=mask) for row in range(rows)]
    scored = range(rows) if params.logprobs else ()
    logits = draw_logits(shape, rows, WIDTH, 5).bfloat16()
    card, thread = [], []
    for _ in range(23):
        start, end = _event(), _event()
        torch.cuda.synchronize()
        # The device starts once all kernels are submitted, so that it never waits for the thread.
        torch.cuda._sleep(6_000_000)  # type: ignore[no-untyped-call]
        began_s = time.perf_counter()
        laid_out = params_of(jobs, WIDTH)
        start.record()
        found = draw_tokens(logits, laid_out, staging)
        score_tokens(logits, found[0], scored, params.logprobs or 0, staging)
        end.record()
        thread.append(1000 * (time.perf_counter() - began_s))
        torch.cuda.synchronize()
        card.append(start.elapsed_time(end))
    return {
        "rows": rows,
        "shape": shape,
        "setting": setting,
        "device_ms": round(statistics.median(card[3:]), 4),
        "thread_ms": round(statistics.median(thread[3:]), 4),
    }


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def cases() -> Iterator[tuple[int, str, str]]:
    """Yield what is timed."""
    for setting in SETTINGS:
        for shape in SHAPES[:2] if "top" in setting else SHAPES[:1]:
            for rows in (1, 16, 64, 256):
                yield rows, shape, setting


def main(arguments: list[str] | None = None) -> None:
    """Compare, time, and write a file after each part."""
    parser = argparse.ArgumentParser(prog="comparisons.cuda.draws", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=10_000)
    chosen = parser.parse_args(arguments)
    staging = Staging(torch.device("cuda"))
    values: dict[str, object] = {"device": torch.cuda.get_device_name(), "width": WIDTH}
    times: list[dict[str, object]] = []
    with torch.inference_mode():
        for case in cases():
            times.append(timed(*case, staging))
            values["times"] = times
            chosen.file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        for width in (WIDTH, 32_000):
            values[f"compared {width}"] = compare(chosen.rows // 2, width, staging)
            chosen.file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
