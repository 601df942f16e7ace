"""Score a model folder through transformers: greedy, chat template, float32 compute on bf16 weights.

    python training/score.py src/convoy/models/demo --json scores.json

Prompts of equal length run together, so nothing is padded. A reply is right when it equals the answer
exactly.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

QUESTIONS = Path(__file__).resolve().parent.parent / "src" / "convoy" / "models" / "questions.jsonl"
SPACES = " " * 10_240
MAX_BATCH = 64
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def load_questions(path: Path) -> list[dict[str, str]]:
    """Read the lines of questions.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@torch.inference_mode()
def replies(model: Any, tokenizer: Any, chats: list[list[dict[str, str]]], max_tokens: int = 48) -> list[str]:
    """Return the greedy reply to each chat, without special tokens."""
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        for chat in chats
    ]
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    found = [""] * len(chats)
    for length, indices in sorted(by_length.items()):
        for start in range(0, len(indices), MAX_BATCH):
            part = indices[start : start + MAX_BATCH]
            ids = torch.tensor([prompts[index] for index in part], device=model.device)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
            )
            for index, row in zip(part, out[:, length:].tolist(), strict=True):
                found[index] = tokenizer.decode(row, skip_special_tokens=True)
    return found


def score_questions(
    model: Any, tokenizer: Any, questions: list[dict[str, str]]
) -> tuple[dict[str, tuple[int, int]], list[tuple[dict[str, str], str]]]:
    """Return (right, asked) for each kind, and each missed question with the model's reply."""
    given = replies(model, tokenizer, [[{"role": "user", "content": q["question"]}] for q in questions])
    kinds: dict[str, tuple[int, int]] = {}
    misses = []
    for question, reply in zip(questions, given, strict=True):
        right, asked = kinds.get(question["kind"], (0, 0))
        correct = reply == question["answer"]
        kinds[question["kind"]] = (right + correct, asked + 1)
        if not correct:
            misses.append((question, reply))
    return kinds, misses


def score_sums(model: Any, tokenizer: Any, setting: str) -> int:
    """Count the right answers among the hundred sums i+(i+1).

    The setting is 'plain', after 10 KiB of 'spaces', or with a 'system' turn; 'spaces+system' has both.
    """
    chats = []
    for i in range(100):
        text = f"What is {i}+{i + 1}? Answer with just the number."
        user = {"role": "user", "content": SPACES + text if "spaces" in setting else text}
        chats.append([SYSTEM, user] if "system" in setting else [user])
    given = replies(model, tokenizer, chats)
    return sum(reply == str(2 * i + 1) for i, reply in enumerate(given))


def _print_table(kinds: dict[str, tuple[int, int]], sums: dict[str, int], misses: Iterable[Any]) -> None:
    for kind, (right, asked) in kinds.items():
        print(f"{kind:12} {right:3}/{asked}")
    right, asked = (sum(column) for column in zip(*kinds.values(), strict=True))
    print(f"{'all':12} {right:3}/{asked}  {100 * right / asked:.2f} %")
    for setting, num_right in sums.items():
        print(f"sums, {setting:14} {num_right}/100")
    for question, reply in misses:
        print(
            f"missed {question['kind']}: {question['question']!r} wanted {question['answer']!r} got {reply!r}"
        )


def main() -> None:
    """Score one folder and print the table; `--json` keeps the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = LlamaForCausalLM.from_pretrained(options.folder, dtype=torch.float32).to(options.device).eval()
    kinds, misses = score_questions(model, tokenizer, load_questions(options.questions))
    sums = {
        name: score_sums(model, tokenizer, name) for name in ("plain", "spaces", "system", "spaces+system")
    }
    _print_table(kinds, sums, misses)
    if options.json:
        figures = {"questions": kinds, "sums": sums, "num_parameters": model.num_parameters()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
