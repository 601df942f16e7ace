"""A tiny configuration for a model without files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SYNTHETIC: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def write_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(SYNTHETIC | changes))
    return path
