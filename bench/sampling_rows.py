"""Time sampling on the host: ``python bench/sampling_rows.py FILE [--before SAMPLE.PY]``.

A step's rows are drawn by `sample_all` and, in turns within one run, row by row by the definition
(`sampling.sample`). ``--before`` names an earlier version of that module, which then takes its place.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from convoy.model.sampling import sample
from convoy.model.sampling.output_rows import SampleJob, sample_all
from convoy.model.sampling.params import SamplingParams

SETTINGS: dict[str, tuple[float, dict[str, Any]]] = {
    "temperature 1": (3.0, {}),
    "temperature 1, flat logits": (0.1, {}),
    "min_p 0.05": (3.0, {"min_p": 0.05}),
    "top_k 50": (3.0, {"top_k": 50}),
    "top_p 0.95": (3.0, {"top_p": 0.95}),
    "top_p 0.95, flat logits": (0.1, {"top_p": 0.95}),
    "top_k 50, top_p 0.95": (3.0, {"top_k": 50, "top_p": 0.95}),
    "logprobs 20": (3.0, {"logprobs": 20}),
}
WIDTHS, ROWS = (32_000, 128_256), (1, 4, 16, 64)
_REPEATS = 5


def main() -> None:
    """Time each setting, and write all results."""
    parser = argparse.ArgumentParser(prog="sampling_rows", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--before", type=Path)
    chosen = parser.parse_args()
    module = _load(chosen.before) if chosen.before else sample
    found = [_measure(module, width, rows, name) for width in WIDTHS for name in SETTINGS for rows in ROWS]
    chosen.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sample_before", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _measure(module: ModuleType, width: int, rows: int, setting: str) -> dict[str, Any]:
    deviation, chosen = SETTINGS[setting]
    drawn = np.random.default_rng(1).standard_normal((rows, width))
    logits = (drawn * deviation).astype(np.float32)
    params = [SamplingParams(seed=row, **chosen) for row in range(rows)]
    jobs = [SampleJob(one, 0, row) for row, one in enumerate(params)]
    by_row, together = [], []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        alone = [
            module.sample(values, one, choice=0, position=row, prompt_ids=(), generated_ids=())
            for row, (values, one) in enumerate(zip(logits, params, strict=True))
        ]
        between_s = time.perf_counter()
        results = sample_all(logits, jobs)
        together.append(time.perf_counter() - between_s)
        by_row.append(between_s - began_s)
        same = [one.token_id for one in alone] == [one.sampled.token_id for one in results]
        assert same, "tokens differ"
    slow_s, fast_s = statistics.median(by_row), statistics.median(together)
    return {
        "width": width,
        "rows": rows,
        "setting": setting,
        "by_row_rows_per_s": round(rows / slow_s, 1),
        "together_rows_per_s": round(rows / fast_s, 1),
        "ratio": round(slow_s / fast_s, 2),
    }


if __name__ == "__main__":
    main()
