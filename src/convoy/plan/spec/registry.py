"""Find the row of a model's family.

The modules of `families` are found by listing it, so that a new family is one new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from convoy.errors import ModelError
from convoy.plan.spec import families as package
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import Family
from convoy.plan.spec.quantization import read_quantization


def _rows() -> Iterator[Family]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.ispkg:
            rows: tuple[Family, ...] = importlib.import_module(found.name).ROWS
            yield from rows


# By model_type.
FAMILIES: dict[str, Family] = {family.model_type: family for family in _rows()}

# Model types that do not fit a stage, and the reasons.
_UNFIT: dict[str, str] = {
    "its layers keep recurrent state": "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 "
    "lfm2_moe mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_next "
    "recurrent_gemma rwkv xlstm zamba zamba2",
    "its decoder is not an embedding, layers with rotary positions, and a norm": "biogpt bloom codegen "
    "falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj mpt opt persimmon phi xglm",
    "several hidden states go from layer to layer": "gemma3n_text",
    "its layers look back on chunks, not on windows": "llama4_text",
    "its layers look back on tokens of their choice": "deepseek_v32 glm_moe_dsa",
}


def read_family(reader: ConfigReader) -> Family:
    """Return the family of a configuration.

    Raises ModelError naming an unsupported type and the supported ones.
    """
    model_type = reader.word("model_type")
    if model_type is None:
        raise ModelError(f"{reader.model}: config.json has no model_type", hint=_supported())
    if model_type not in FAMILIES:
        reason = next((f": {why}" for why, types in _UNFIT.items() if model_type in types.split()), "")
        raise ModelError(
            f"{reader.model}: model type {model_type!r} is not supported{reason}", hint=_supported()
        )
    # Raises for an unknown quantisation.
    read_quantization(reader)
    family = FAMILIES[model_type]
    for key in family.refused_keys:
        if reader.get(key):
            raise reader.wrong(
                key,
                reader.get(key),
                f"false or unset: Convoy does not support this option for {family.model_type}",
            )
    return family


def _supported() -> str:
    return f"supported types: {', '.join(sorted(FAMILIES))}"
