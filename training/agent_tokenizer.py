"""Learn the tokeniser of `synthetic:agent` from the text of this repository, and write it.

Run `python training/agent_tokenizer.py`. Agents send English, code and JSON schemas, and so does this text:
about three characters make a token. The file is kept in `src/convoy/models/agent`, because a later text gives
another tokeniser.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "src/convoy/models/agent"
VOCAB_SIZE = 8192
# the turns of ChatML are special; the marks of Hermes are text for a model, as in Qwen3
TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def texts() -> list[str]:
    """Return the text of the documentation and of the source, in the order of their paths."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.py")]
    return [file.read_text("utf-8") for file in sorted(files)]


def learn(documents: list[str]) -> Tokenizer:
    """Return a byte-level tokeniser with `VOCAB_SIZE` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TURNS) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in TURNS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKS])
    return tokenizer


def main() -> None:
    """Write the tokeniser's two files beside the chat template."""
    learn(texts()).save(str(FOLDER / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
