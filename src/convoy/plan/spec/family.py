"""The families that Convoy can plan, and their differences as data.

Every row was read from the family's configuration and modelling code in `transformers`, defaults included: a
missing key must mean the same to the plan as to the loader. `plan.spec.heads` reads heads and windows by
these words, and `plan.spec.tensors` lists the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from convoy.errors import ModelError
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.quantization import read_quantization

MAX_LAYERS = 1024
# Hidden, intermediate and attention widths.
MAX_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 27
MAX_EXPERTS = 1 << 14
# Hidden states of a token.
MAX_STREAMS = 64


@dataclass(frozen=True)
class Family:
    """Describe the differences between one family of decoders and the next."""

    model_type: str
    # The values of keys that are not written.
    defaults: Mapping[str, object] = field(default_factory=dict)
    # "alike" in all layers; "by layer type"; "latent": expanded from one latent a token; "compressed": one
    # key a token within a window, and beyond it one for several.
    heads: str = "alike"
    # "joined": one linear for q, k and v.
    qkv: str = "apart"
    # None: the key attention_bias decides.
    qkv_bias: bool | None = False
    # Whether attention_bias applies to o_proj too.
    out_bias: bool = False
    # RMS norms over each head's query and key.
    qk_norm: bool = False
    # Whether the query's linear also makes a gate for attention's result.
    gated: bool = False
    # Whether layers of type "linear_attention" are gated delta nets.
    recurrent: bool = False
    # A logit of each query head that takes part in the softmax and has no value.
    sinks: bool = False
    # The layers with a sliding window: "always", "if used", "after a layer" or "by layer type".
    window: str | None = None
    # Without layer_types, every layer with a multiple of this number looks back on everything.
    full_every: int = 0
    # The key that may override full_every.
    full_every_key: str = ""
    # "joined": one linear for gate and up.
    mlp: str = "gated"
    # Whether the key mlp_bias counts.
    mlp_bias: bool = False
    # The family that gives the layout of a mixture of experts.
    experts: str | None = None
    # 4: also after attention and MLP.
    num_norms: int = 2
    # Whether the loader refuses a hidden_size that the heads do not divide.
    divides_hidden: bool = False
    # Whether a layer's weight is read from the checkpoint's headers.
    counted: bool = False
    # True or set, these keys ask for an option that a stage does not support.
    refused_keys: tuple[str, ...] = ()


_GEMMA: dict[str, object] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_GEMMA_2 = _GEMMA | {
    "vocab_size": 256_000,
    "num_hidden_layers": 26,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}
_GEMMA_3 = _GEMMA_2 | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_GEMMA_4 = _GEMMA | {
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_GPT_OSS: dict[str, object] = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "attention_bias": True,
}
_DEEPSEEK_V3: dict[str, object] = {
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
}
_QWEN_3_5: dict[str, object] = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_3_5_MOE = _QWEN_3_5 | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_DEEPSEEK_V4: dict[str, object] = {
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "max_position_embeddings": 1_048_576,
    "hc_mult": 4,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
}
_QWEN_2: dict[str, object] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", qkv_bias=None, out_bias=True, mlp_bias=True, divides_hidden=True),
        Family("mistral", {"sliding_window": 4096, "num_key_value_heads": 8}, window="always"),
        Family("qwen2", _QWEN_2, qkv_bias=True, window="after a layer"),
        Family(
            "qwen3",
            _QWEN_2 | {"head_dim": 128},
            qkv_bias=None,
            out_bias=True,
            qk_norm=True,
            window="after a layer",
        ),
        Family(
            "qwen3_moe",
            {
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "num_experts": 128,
                "moe_intermediate_size": 768,
                "decoder_sparse_step": 1,
            },
            qkv_bias=None,
            out_bias=True,
            qk_norm=True,
            window="if used",
            experts="qwen3_moe",
        ),
        *(
            Family(
                model_type,
                defaults,
                qkv_bias=None,
                out_bias=True,
                qk_norm=True,
                gated=True,
                recurrent=True,
                full_every=4,
                full_every_key="full_attention_interval",
                experts=experts,
            )
            for model_type, defaults, experts in (
                ("qwen3_5_text", _QWEN_3_5, None),
                ("qwen3_5_moe_text", _QWEN_3_5_MOE, "qwen3_5_moe"),
            )
        ),
        Family(
            "phi3", {"original_max_position_embeddings": 4096}, qkv="joined", mlp="joined", window="always"
        ),
        Family(
            "gemma2",
            _GEMMA_2,
            qkv_bias=None,
            out_bias=True,
            window="by layer type",
            full_every=2,
            num_norms=4,
            divides_hidden=True,
            refused_keys=("use_bidirectional_attention",),
        ),
        Family(
            "gemma3_text",
            _GEMMA_3,
            qkv_bias=None,
            out_bias=True,
            qk_norm=True,
            window="by layer type",
            full_every=6,
            full_every_key="sliding_window_pattern",
            num_norms=4,
            divides_hidden=True,
            refused_keys=("use_bidirectional_attention",),
        ),
        Family(
            "gemma4_text",
            _GEMMA_4,
            heads="by layer type",
            qkv_bias=None,
            out_bias=True,
            qk_norm=True,
            window="by layer type",
            full_every=6,
            experts="gemma4",
            num_norms=4,
        ),
        Family(
            "gpt_oss",
            _GPT_OSS,
            qkv_bias=None,
            out_bias=True,
            sinks=True,
            window="by layer type",
            full_every=2,
            experts="gpt_oss",
        ),
        Family("deepseek_v3", _DEEPSEEK_V3, heads="latent", experts="deepseek_v3"),
        Family(
            "deepseek_v4",
            _DEEPSEEK_V4,
            heads="compressed",
            experts="deepseek_v4",
            refused_keys=("quantization_config", "quantization"),
        ),
        # A model of embedding, layers and norm alone needs no further row.
        Family("apertus", counted=True),
        Family("arcee", counted=True),
        Family("cohere", {"tie_word_embeddings": True}, counted=True),
        Family(
            "cohere2",
            {"tie_word_embeddings": True, "sliding_window": 4096},
            window="by layer type",
            full_every=4,
            full_every_key="sliding_window_pattern",
            counted=True,
        ),
        Family("ernie4_5", {"tie_word_embeddings": True, "head_dim": 128}, counted=True),
        Family("gemma", {"tie_word_embeddings": True, "head_dim": 256}, counted=True),
        Family("glm", {"head_dim": 128}, counted=True),
        Family("glm4", {"head_dim": 128}, counted=True),
        Family("glm4_moe", counted=True),
        Family("granite", counted=True),
        Family("mixtral", {"num_key_value_heads": 8}, window="always", counted=True),
        Family("olmo2", counted=True),
        Family("olmo3", {"sliding_window": 4096}, window="by layer type", full_every=4, counted=True),
        Family("olmoe", counted=True),
        Family("qwen2_moe", counted=True, refused_keys=("use_sliding_window",)),
        Family("seed_oss", {"num_key_value_heads": 8, "head_dim": 128}, counted=True),
        Family(
            "smollm3",
            {"tie_word_embeddings": True, "num_key_value_heads": 4},
            counted=True,
            refused_keys=("use_sliding_window",),
        ),
    )
}


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
