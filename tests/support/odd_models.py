"""Random models with awkward dimensions, made through `transformers`."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 105
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>"]


def make_odd_llama(directory: Path, **changes: Any) -> Path:
    """Make a Llama with head_dim 8, a vocabulary of 105, tied embeddings and an MLP of 44: no multiple of
    16.
    """
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**(_settings() | changes)))
    model.save_pretrained(directory)
    _letters().save_pretrained(directory)
    return directory


def make_windowed_qwen3(directory: Path, window: int = 24) -> Path:
    """Make a Qwen3 with layers that see ``window`` tokens beside layers that see all; as odd as the Llama."""
    torch.manual_seed(3)
    kinds = [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")]
    slides = {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    model = Qwen3ForCausalLM(Qwen3Config(**(_settings() | {"num_attention_heads": 6} | slides)))
    model.save_pretrained(directory)
    _letters().save_pretrained(directory)
    return directory


def _settings() -> dict[str, Any]:
    return {
        "hidden_size": 40,
        "intermediate_size": 44,
        "num_hidden_layers": 5,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
        # Wide enough that a random model does not repeat one token.
        "initializer_range": 0.4,
    }


def _letters() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each printable ASCII character: 100, after the five special ones."""
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *string.printable])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|end|>"
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
