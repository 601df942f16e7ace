"""Tokenisers made on the spot: byte-level BPE as in the bundled models, SentencePiece, Unigram."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from convoy.model.checkpoints.source import ModelSource
from convoy.model.text.tokens import Tokenizer as TextTokenizer
from convoy.plan.spec.model import ModelSpec

CORPUS = [
    "hello world, how are you today? the stop sign stops the stopped car.",
    "héllo wörld 你好世界 🙂🙃 naïve café",
    "def main():\n    return 1\n\n\nsystem user assistant",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SPECIAL = ["<|bos|>", "<|turn|>", "<|end|>", "<|eos|>"]
VOCAB_SIZE = 512


def byte_level() -> Tokenizer:
    """Make a byte-level BPE: every string round-trips, and characters are split over tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(" " * 16, normalized=False), AddedToken("<tool>", normalized=False)])
    return backend


def sentence_piece() -> Tokenizer:
    """Make Llama 2's kind: a space before the first word, byte fallback, a decoder that strips the first
    space.
    """
    letters = sorted(
        {letter for line in CORPUS for letter in line.replace(" ", "\u2581") if ord(letter) < 0x300}
    )
    letters += ["\u2581"] if "\u2581" not in letters else []
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *letters, "he", "ll", "\u2581w", "\u2581wo"]:
        vocab.setdefault(token, len(vocab))
    merges = [("h", "e"), ("l", "l"), ("\u2581", "w"), ("\u2581w", "o")]
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return backend


def unigram() -> Tokenizer:
    """Make a vocabulary that holds a control string as an ordinary piece, so that plain text can hit it."""
    letters = sorted(set("".join(CORPUS)) | set("<|>eosndtur"))
    pieces = [("<unk>", 0.0), ("<|end|>", -1.0), *((letter, -5.0) for letter in letters)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.add_special_tokens(["<|end|>", "<|turn|>", "<|bos|>", "<|eos|>"])
    backend.decoder = decoders.Fuse()
    return backend


def load(
    backend: Tokenizer,
    directory: Path,
    special: Mapping[str, str],
    *,
    template: str | None = TEMPLATE,
    config: Mapping[str, object] | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> TextTokenizer:
    """Save a backend as a Hugging Face directory and open it as Convoy does."""
    pretrained = PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]
    pretrained.chat_template = template
    pretrained.save_pretrained(directory)
    return TextTokenizer(source(directory, config, vocab_size))


def source(
    directory: Path, config: Mapping[str, object] | None = None, vocab_size: int = VOCAB_SIZE
) -> ModelSource:
    """Return a described model without weights, because text needs none."""
    whole: dict[str, object] = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
        **(config or {}),
    }
    return ModelSource("tiny", directory, whole, ModelSpec.from_config(whole, "tiny"), "", {})
