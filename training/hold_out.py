"""Write the held-out questions: fifty of each kind, one JSON object a line.

    python training/hold_out.py --out src/convoy/models/questions.jsonl

Another `--seed` gives another set of held-out questions, to check a model on questions not looked at before.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from questions import held_out_questions

SEED, NUM_PER_KIND = 20261121, 50


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--num-per-kind", type=int, default=NUM_PER_KIND)
    options = parser.parse_args()
    lines = [
        json.dumps({"kind": q.kind, "question": q.text, "answer": q.answer})
        for q in held_out_questions(options.seed, options.num_per_kind)
    ]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
