"""Define the shapes of the two models, as ordinary Llama configurations."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, LlamaConfig

from tokenizer import END_OF_TEXT, END_OF_TURN, MAX_POSITIONS, PAD, SPECIAL_TOKENS, VOCAB_SIZE

END_IDS = [SPECIAL_TOKENS.index(END_OF_TURN), SPECIAL_TOKENS.index(END_OF_TEXT)]
PAD_ID = SPECIAL_TOKENS.index(PAD)

SIZES: dict[str, dict[str, Any]] = {
    "demo": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "demo-mini": {
        "hidden_size": 192,
        "intermediate_size": 448,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
}
"""demo has 7.6 million parameters, demo-mini 1.8 million; heads of 32, the embedding is the output too."""


def llama_config(name: str) -> LlamaConfig:
    """Return the configuration of `demo` or `demo-mini`."""
    return LlamaConfig(
        **SIZES[name],
        vocab_size=VOCAB_SIZE,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_id=END_IDS,
        pad_token_id=PAD_ID,
    )


def generation_config() -> GenerationConfig:
    """Return a configuration for greedy generation that ends at the end of a turn or of a text."""
    # The library's class is untyped.
    make: Any = GenerationConfig
    config: GenerationConfig = make(
        do_sample=False, bos_token_id=None, eos_token_id=END_IDS, pad_token_id=PAD_ID
    )
    return config
