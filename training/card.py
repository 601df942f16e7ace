"""Write MODEL_CARD.md into a model folder, from the training records and the scores.

    python training/card.py src/convoy/models/demo --records first.json second.json --scores scores.json \\
        --fresh fresh.json

The records are the NAME-training.json files that `train.py` leaves, in the order of the stretches. The scores
come from `score.py --json` on the very files that are shipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from shapes import SIZES
from tokenizer import MAX_POSITIONS, VOCAB_SIZE

DATE = "2026-11-21"

CARD = """\
# {name}

A small Llama-architecture model that comes with Convoy, so that a newcomer has something real to run, split
and serve before downloading weights. It is a demonstration: it does eight kinds of exercise and tells short
stories, and knows nothing else of the world. Asked anything outside that, it answers nonsense.

| | |
|---|---|
| parameters | {num_parameters:,} (embedding and output tied) |
| layers | {num_hidden_layers}, hidden {hidden_size}, intermediate {intermediate_size}, \
{num_attention_heads} heads of 32, {num_key_value_heads} KV heads |
| context | {context:,} tokens |
| vocabulary | {vocab:,}, byte-level BPE; each digit a token; runs of 2, 4, 8 ... 256 spaces are tokens |
| ends of generation | `<\\|end\\|>` (a turn), `<\\|endoftext\\|>` (a text) |
| weights | bf16, `model.safetensors`, SHA-256 `{digest}` |
| date | {date} |

## Data

All text was written by the generators in `training/` (word lists, templates and a story grammar of our
own): no third-party text, no other model's weights. Questions with one right answer in eight kinds, alone
or in conversations with system messages, earlier turns, runs of spaces and unrelated text before them;
short stories; greetings; counting aloud; JSON answers. Loss on the assistant's tokens, and on whole texts
where there is no conversation.

A question is held out of training when the SHA-256 of its normalised text falls in one bucket of sixteen;
for sums, differences, comparisons and sorting the operands are hashed as well, whatever the wording (sums,
differences and pairs to compare only where a number is 200 or more). The shipped 400 were chosen so that no
longer question of the training text holds one whole. For the other kinds a held-out question is a new
wording, or a new combination, of words and units that training did use.

## Training

`training/train.py`, AdamW, warm-up and a cosine to zero, bf16 autocast, {batch_tokens:,} tokens a step.

| stretch | steps | seconds | peak rate | extra practice | loss at the end | hardware |
|---|---|---|---|---|---|---|
{stretches}

The losses of two stretches do not compare: the second has another mix of questions. Its extra practice was
chosen by looking at which kinds of held-out question were weak after the first stretch, which flatters the
first score below; the draw of 1,600 was made after training. Both models trained at once on the one GPU.

## Scores

Measured on these files, on a CPU through `transformers`, float32 compute on the bf16 weights, greedy, chat
template, exact match (`training/score.py`):

| kind | `questions.jsonl` | a fresh draw of held-out questions |
|---|---|---|
{kinds}

The fresh draw is `training/hold_out.py --seed 77 --num-per-kind 200`.

`What is {{i}}+{{i+1}}? Answer with just the number.` for i in 0..99:

| setting | right |
|---|---|
{sums}
"""


def _stretch(number: int, name: str, record: dict[str, Any]) -> str:
    rate = record["peak_rates"][name] * record["rate_scale"]
    practice = ", ".join(record.get("practice", [])) or "none"
    cells = (number, f"{record['steps']:,}", record["seconds"], f"{rate:g}", practice)
    return "| " + " | ".join(str(cell) for cell in (*cells, f"{record['loss']:.4f}", record["device"])) + " |"


def _total(kinds: dict[str, list[int]]) -> str:
    right, asked = (sum(column) for column in zip(*kinds.values(), strict=True))
    return f"{right:,} of {asked:,} ({100 * right / asked:.2f} %)"


def card(folder: Path, records: list[dict[str, Any]], scores: dict[str, Any], fresh: dict[str, Any]) -> str:
    """Return the card's text."""
    name = folder.resolve().name
    shipped, drawn = scores["questions"], fresh["questions"]
    kinds = [
        f"| {kind} | {n} of {of} | {drawn[kind][0]} of {drawn[kind][1]} |"
        for kind, (n, of) in shipped.items()
    ]
    kinds.append(f"| **all** | **{_total(shipped)}** | **{_total(drawn)}** |")
    titles = {
        "plain": "alone",
        "spaces": "behind 10,240 spaces",
        "system": "with a system message",
        "spaces+system": "with both",
    }
    return CARD.format(
        name=name,
        num_parameters=scores["num_parameters"],
        **SIZES[name],
        context=MAX_POSITIONS,
        vocab=VOCAB_SIZE,
        digest=hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        date=DATE,
        batch_tokens=records[0]["batch_tokens"],
        stretches="\n".join(_stretch(number, name, record) for number, record in enumerate(records, 1)),
        kinds="\n".join(kinds),
        sums="\n".join(f"| {titles[key]} | {n} of 100 |" for key, n in scores["sums"].items()),
    )


def main() -> None:
    """Write the card into the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--records", type=Path, nargs="+", required=True)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--fresh", type=Path, required=True, help="scores on a draw made after training")
    options = parser.parse_args()
    records = [json.loads(path.read_text()) for path in options.records]
    scores, fresh = (json.loads(path.read_text()) for path in (options.scores, options.fresh))
    text = card(options.folder, records, scores, fresh)
    (options.folder / "MODEL_CARD.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
