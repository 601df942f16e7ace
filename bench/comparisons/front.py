"""Compare a front process with HTTP in the engine's process: ``python -m comparisons.front FILE``.

Two servers of one model run on this machine. Each round asks both in turn, so that other work on the machine
meets both. ``CONVOY_BENCH_MODEL`` names the model.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

from comparisons.cuda.server import MODEL, measure, serving

WAYS = {"engine's process": "--no-http-process", "front process": "--http-process"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--streams", default="16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=256, help="token ids of prompts are below this")
    parser.add_argument("--port", type=int, default=8771)
    parser.add_argument("--flags", default="--max-batch 64", help="flags of `convoy run`, in one word")
    chosen = parser.parse_args()
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        ports = {way: chosen.port + number for number, way in enumerate(WAYS)}
        for way, flag in WAYS.items():
            flags = [flag, *shlex.split(chosen.flags)]
            stack.enter_context(serving(ports[way], flags, chosen.file.with_suffix(".log")))
        for number in range(-1, chosen.rounds):
            for size in map(int, chosen.streams.split(",")):
                # The first round warms both up; then each way begins every second round.
                for way in list(WAYS)[:: 1 if number % 2 else -1]:
                    sizes = {"context": chosen.context, "vocab": chosen.vocab}
                    row = measure(ports[way], size, "greedy", 100 * size + number, chosen.answer, **sizes)
                    if number >= 0:
                        rows.append({"way": way, **row, "round": number})
                        sys.stdout.write(f"{rows[-1]}\n")
                        sys.stdout.flush()
    report = {"model": MODEL, "flags": chosen.flags, "rows": rows, "medians": _medians(rows)}
    chosen.file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _medians(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the medians of each way and number of streams."""
    found = []
    for size, way in sorted({(row["streams"], row["way"]) for row in rows}, key=str):
        own = [row for row in rows if (row["streams"], row["way"]) == (size, way)]
        values = {
            name: round(statistics.median(float(str(row[name])) for row in own), 2)
            for name in ("tokens_per_s", "p50_ms", "p99_ms", "first_p50_ms")
        }
        found.append({"streams": size, "way": way, **values})
    return found


if __name__ == "__main__":
    main()
