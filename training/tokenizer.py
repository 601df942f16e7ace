"""The byte-level BPE tokeniser of the bundled models, learnt from generated text.

Digits are always single tokens. Runs of 2, 4, ... 256 spaces are tokens made by doubling, so 10,240 spaces
are 40 tokens. There is no beginning-of-text token; `<|end|>` ends a turn and `<|endoftext|>` ends a text.

    python training/tokenizer.py --out src/convoy/models/demo src/convoy/models/demo-mini
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import words
from conversations import document

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
SPACE_RUNS = tuple(2**k for k in range(1, 9))

END_OF_TEXT, END_OF_TURN, SYSTEM, USER, ASSISTANT, PAD = (
    "<|endoftext|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|pad|>",
)
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, SYSTEM, USER, ASSISTANT, PAD)
"""In order of their ids, from 0."""

PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['content'] is string -%}
        {%- set text = message['content'] -%}
    {%- else -%}
        {%- set parts = namespace(text='') -%}
        {%- for part in message['content'] or [] -%}
            {%- if part['type'] == 'text' -%}
                {%- set parts.text = parts.text + part['text'] -%}
            {%- else -%}
                {{- raise_exception('only text parts are understood') -}}
            {%- endif -%}
        {%- endfor -%}
        {%- set text = parts.text -%}
    {%- endif -%}
    {%- if message['role'] in ('system', 'developer') -%}
        {{- '<|system|>' + text + '<|end|>' -}}
    {%- elif message['role'] == 'user' -%}
        {{- '<|user|>' + text + '<|end|>' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<|assistant|>' + text + '<|end|>' -}}
    {%- else -%}
        {{- raise_exception('unknown role ' + message['role']) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def _pieces() -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _corpus(seed: int, num_documents: int) -> Iterator[str]:
    """Yield generated text without leading spaces (their tokens are made, not learnt), and each word both
    ways.
    """
    rng = random.Random(seed)
    for _ in range(num_documents):
        for role, text in document(rng).turns:
            if role != "assistant" or "," in text or len(text) > 12:
                yield text.strip()
    for word in (*words.SPELLABLE, *words.NAMES, *words.PET_NAMES, *words.TOWNS):
        yield from [f"{word} {word}"] * 20


def build(seed: int = 1, num_documents: int = 40_000) -> Tokenizer:
    """Learn the merges and put the runs of spaces behind them. Deterministic for a seed."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _pieces()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPACE_RUNS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(_corpus(seed, num_documents), trainer)
    learnt = json.loads(learner.to_str())["model"]
    vocab: dict[str, int] = dict(learnt["vocab"])
    # The byte-level alphabet's sign for a space.
    space = "Ġ"
    if any(piece.startswith(space * 2) for piece in vocab):
        raise ValueError("a run of spaces was learnt from the corpus, expected none")
    merges = [tuple(pair) for pair in learnt["merges"]]
    for run in SPACE_RUNS:
        merges.append((space * (run // 2), space * (run // 2)))
        vocab[space * run] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pieces()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens came out, expected {VOCAB_SIZE}")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja as Hugging Face reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    """Build the tokeniser and write it into each folder named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tokenizer = build(options.seed)
    for folder in options.out:
        save(tokenizer, folder)


if __name__ == "__main__":
    main()
