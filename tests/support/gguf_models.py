"""Tiny GGUF files of each family, written as llama.cpp's converter writes them, through its `gguf` package.

The package's own tables give the names of tensors. The changes of values follow the converter. All matrices
hold whole numbers up to 127 times a power of two, and half of them are 127 or -127, so Q8_0 keeps each value
in whichever direction a block lies. A file therefore stands for the model itself in either type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

State = dict[str, torch.Tensor]
Changed = Iterator[tuple[str, torch.Tensor]]
Change = Callable[[str, torch.Tensor, Any], Changed]
Describe = Callable[[gguf.GGUFWriter, Any], object]

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_DELTA: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 4,
    "full_attention_interval": 3,
    "rms_norm_eps": 0.01,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2}


@dataclass(frozen=True)
class Written:
    """Hold a file and the library's model that it stands for."""

    path: Path
    model: Any


@dataclass(frozen=True)
class GgufCase:
    """Describe a family's model, and how the converter writes it."""

    architecture: str
    config: Any
    sizes: Mapping[str, Any]
    change: Change
    describe: Describe = lambda *_: None
    # Tensors outside the model's own.
    beside: Callable[[Any], State] = field(default=lambda _: {})


def _plain(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    yield name, tensor


def _turned(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is not None:
        tensor = tensor.view(count, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
    yield from _stacked(name, tensor, config)


def _plus_one(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _stacked(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    elif name.endswith("shared_expert_gate.weight"):
        yield name, tensor[0]
    else:
        yield name, tensor


def _gpt_oss(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    if name.endswith("gate_up_proj_bias"):
        yield name.replace("gate_up_proj_bias", "gate_proj.bias"), tensor[..., ::2]
        yield name.replace("gate_up_proj_bias", "up_proj.bias"), tensor[..., 1::2]
    elif name.endswith("gate_up_proj"):
        rows = tensor.transpose(1, 2)
        yield name.replace("gate_up_proj", "gate_proj.weight"), rows[:, ::2]
        yield name.replace("gate_up_proj", "up_proj.weight"), rows[:, 1::2]
    elif name.endswith("down_proj_bias"):
        yield name.replace("down_proj_bias", "down_proj.bias"), tensor
    elif name.endswith("down_proj"):
        yield f"{name}.weight", tensor.transpose(1, 2)
    else:
        yield f"{name}.weight" if name.endswith("sinks") else name, tensor


def _deepseek(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    if name.endswith("e_score_correction_bias"):
        yield name.replace("_bias", ".bias"), tensor
    elif name.endswith("kv_b_proj.weight"):
        heads, fixed = config.num_attention_heads, config.qk_nope_head_dim
        of_heads = tensor.view(heads, -1, tensor.shape[-1])
        yield name.replace("kv_b_proj", "k_b_proj"), of_heads[:, :fixed].transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), of_heads[:, fixed:]
    else:
        yield from _stacked(name, tensor, config)


def _joined_latents(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    """Write as the converter did before it split this matrix."""
    yield from (_stacked if "kv_b_proj" in name else _deepseek)(name, tensor, config)


def _delta(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width, before = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim

    def tiled(part: torch.Tensor, head: int, dim: int = 0) -> torch.Tensor:
        shape = (*part.shape[:dim], keys, values // keys, head, *part.shape[dim + 1 :])
        apart = part.reshape(shape)
        return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        tensor = tensor.squeeze()
        tensor = torch.cat((tensor[:before], tiled(tensor[before:], width)))
    elif name.endswith("in_proj_z.weight"):
        tensor = tiled(tensor, width)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        tensor = tiled(tensor, 1)
    elif name.endswith("linear_attn.out_proj.weight"):
        tensor = tiled(tensor, width, 1)
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    yield from _stacked(name.replace(".dt_bias", ".dt_proj.bias"), tensor, config)


def _gemma_4(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    if name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        name += ".weight"
    for theirs, ours in (("router.scale", "ffn_gate_inp.scale"), ("per_expert_scale", "ffn_down_exps.scale")):
        if name.endswith(theirs):
            name = f"blk.{name.split('.')[2]}.{ours}"
    yield name, tensor


def _describe_base(file: gguf.GGUFWriter, config: Any) -> None:
    """Write the settings that the converter writes for every family that has them."""
    found = config.to_dict()
    file.add_block_count(config.num_hidden_layers)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(found["num_key_value_heads"])
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = found["rope_parameters"]
    full = rope.get("full_attention", rope)
    if full["rope_type"] in ("yarn", "linear"):
        file.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        file.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        file.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        file.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        file.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    if "mrope_section" in rope:
        file.add_rope_dimension_sections([*rope["mrope_section"], 0])
    file.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in rope:
        file.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((found[key] for key in keys if found.get(key)), None)
    if experts is not None:
        file.add_expert_count(experts)
        file.add_expert_used_count(found.get("num_experts_per_tok") or found["top_k_experts"])
    if found.get("head_dim") is not None:
        file.add_key_length(found["head_dim"])
        file.add_value_length(found["head_dim"])


def _describe_moe(file: gguf.GGUFWriter, config: Any) -> None:
    file.add_expert_feed_forward_length(config.moe_intermediate_size)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared is not None:
        file.add_expert_shared_feed_forward_length(shared)


def _describe_granite(file: gguf.GGUFWriter, config: Any) -> None:
    file.add_attention_scale(config.attention_multiplier)
    file.add_embedding_scale(config.embedding_multiplier)
    file.add_residual_scale(config.residual_multiplier)
    file.add_logit_scale(config.logits_scaling)


def _describe_gemma(file: gguf.GGUFWriter, config: Any) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            getattr(file, f"add_{name}")(getattr(config, name))
    file.add_sliding_window(config.sliding_window)


def _describe_gemma_4(file: gguf.GGUFWriter, config: Any) -> None:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    window, full = (config.per_layer_config[slides.index(one)] for one in (True, False))
    _describe_gemma(file, config)
    file.add_shared_kv_layers(config.num_kv_shared_layers)
    file.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    file.add_sliding_window_pattern(slides)
    file.add_key_length(full.head_dim)
    file.add_value_length(full.head_dim)
    file.add_key_length_swa(window.head_dim)
    file.add_value_length_swa(window.head_dim)
    if config.moe_intermediate_size is not None:
        file.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.use_double_wide_mlp:
        own = config.num_hidden_layers - config.num_kv_shared_layers
        width = config.intermediate_size
        file.add_feed_forward_length([width if i < own else 2 * width for i in range(len(slides))])
    counts = window.num_key_value_heads, full.num_key_value_heads
    file.add_head_count_kv([counts[0] if one else counts[1] for one in slides])
    file.add_rope_dimension_count(full.head_dim)
    file.add_rope_dimension_count_swa(window.head_dim)


def _proportion(config: Any) -> State:
    full = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
    turned = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    return {"rope_freqs.weight": torch.tensor([1.0] * turned + [1e30] * (full // 2 - turned))}


def _describe_phi(file: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    width = config.hidden_size // config.num_attention_heads
    file.add_rope_dimension_count(int(width * rope["partial_rotary_factor"]))
    file.add_sliding_window(config.sliding_window or 0)
    file.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if "long_factor" in rope:
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        file.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _long_factors(config: Any) -> State:
    rope = config.rope_parameters
    names = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
    return {theirs: torch.tensor(rope[ours]) for ours, theirs in names.items() if ours in rope}


def _describe_gpt_oss(file: gguf.GGUFWriter, config: Any) -> None:
    file.add_sliding_window(config.sliding_window)
    file.add_expert_feed_forward_length(config.intermediate_size)


def _describe_deepseek(file: gguf.GGUFWriter, config: Any) -> None:
    latent, rotary = config.kv_lora_rank, config.qk_rope_head_dim
    _describe_deepseek_experts(file, config)
    file.add_head_count_kv(1)
    file.add_key_length(latent + rotary)
    file.add_value_length(latent)
    file.add_key_length_mla(config.qk_nope_head_dim + rotary)
    file.add_value_length_mla(config.v_head_dim)


def _describe_deepseek_joined(file: gguf.GGUFWriter, config: Any) -> None:
    _describe_deepseek_experts(file, config)
    file.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    file.add_value_length(config.v_head_dim)


def _describe_deepseek_experts(file: gguf.GGUFWriter, config: Any) -> None:
    file.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank is not None:
        file.add_q_lora_rank(config.q_lora_rank)
    file.add_kv_lora_rank(config.kv_lora_rank)
    file.add_expert_feed_forward_length(config.moe_intermediate_size)
    file.add_expert_shared_count(config.n_shared_experts)
    file.add_expert_weights_scale(config.routed_scaling_factor)
    file.add_expert_weights_norm(config.norm_topk_prob)
    file.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    file.add_expert_group_count(config.n_group)
    file.add_expert_group_used_count(config.topk_group)
    file.add_rope_dimension_count(config.qk_rope_head_dim)
    if "mscale_all_dim" in config.rope_parameters:
        file.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _describe_delta(file: gguf.GGUFWriter, config: Any) -> None:
    file.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    file.add_ssm_state_size(config.linear_key_head_dim)
    file.add_ssm_group_count(config.linear_num_key_heads)
    file.add_ssm_time_step_rank(config.linear_num_value_heads)
    file.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    file.add_full_attention_interval(3)
    file.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if hasattr(config, "moe_intermediate_size"):
        _describe_moe(file, config)


_ALIKE = {key: value for key, value in _SIZES.items() if key != "head_dim"}
_DEEPSEEK: dict[str, Any] = {
    **_ALIKE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_GEMMA_4: dict[str, Any] = {
    **_SIZES,
    **_WINDOWS,
    "num_hidden_layers": 4,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
}
CASES: dict[str, GgufCase] = {
    "llama": GgufCase("llama", transformers.LlamaConfig, _SIZES, _turned),
    "mixtral": GgufCase("llama", transformers.MixtralConfig, {**_SIZES, "num_local_experts": 4}, _turned),
    "qwen3 yarn": GgufCase("qwen3", transformers.Qwen3Config, {**_SIZES, "rope_parameters": _YARN}, _plain),
    "qwen2_moe": GgufCase(
        "qwen2moe",
        transformers.Qwen2MoeConfig,
        {**_SIZES, **_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32},
        _stacked,
        _describe_moe,
    ),
    "qwen3_moe": GgufCase(
        "qwen3moe",
        transformers.Qwen3MoeConfig,
        {**_SIZES, **_EXPERTS, "norm_topk_prob": True},
        _stacked,
        _describe_moe,
    ),
    "arcee": GgufCase("arcee", transformers.ArceeConfig, _SIZES, _turned),
    "granite": GgufCase(
        "granite",
        transformers.GraniteConfig,
        {
            **_ALIKE,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
        _turned,
        _describe_granite,
    ),
    "seed_oss": GgufCase("seed_oss", transformers.SeedOssConfig, _SIZES, _plain),
    "smollm3": GgufCase("smollm3", transformers.SmolLM3Config, {**_ALIKE, "num_hidden_layers": 5}, _turned),
    "gemma": GgufCase("gemma", transformers.GemmaConfig, _SIZES, _plus_one),
    "gemma2": GgufCase(
        "gemma2",
        transformers.Gemma2Config,
        {
            **_SIZES,
            "sliding_window": 20,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
        _plus_one,
        _describe_gemma,
    ),
    "gemma3_text": GgufCase(
        "gemma3",
        transformers.Gemma3TextConfig,
        {
            **_SIZES,
            "num_hidden_layers": 7,
            "sliding_window": 20,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        _plus_one,
        _describe_gemma,
    ),
    "phi3": GgufCase(
        "phi3",
        transformers.Phi3Config,
        {
            **_ALIKE,
            "eos_token_id": None,
            "num_attention_heads": 2,
            "sliding_window": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
        _plain,
        _describe_phi,
    ),
    "phi3 long": GgufCase(
        "phi3",
        transformers.Phi3Config,
        {
            **_ALIKE,
            "eos_token_id": None,
            "num_attention_heads": 2,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 256,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
            },
        },
        _plain,
        _describe_phi,
        _long_factors,
    ),
    "gpt_oss": GgufCase(
        "gpt-oss",
        transformers.GptOssConfig,
        {
            **_SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "rope_parameters": {**_YARN, "truncate": False},
        },
        _gpt_oss,
        _describe_gpt_oss,
    ),
    "deepseek_v3": GgufCase(
        "deepseek2",
        transformers.DeepseekV3Config,
        {**_DEEPSEEK, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        _deepseek,
        _describe_deepseek,
    ),
    "deepseek_v3 joined": GgufCase(
        "deepseek2",
        transformers.DeepseekV3Config,
        {**_DEEPSEEK, "q_lora_rank": None},
        _joined_latents,
        _describe_deepseek_joined,
    ),
    "qwen3_5_text": GgufCase("qwen35", transformers.Qwen3_5TextConfig, _DELTA, _delta, _describe_delta),
    "qwen3_5_moe_text": GgufCase(
        "qwen35moe",
        transformers.Qwen3_5MoeTextConfig,
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
        _delta,
        _describe_delta,
    ),
    "gemma4_text": GgufCase(
        "gemma4",
        transformers.Gemma4TextConfig,
        {
            **_GEMMA_4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        _gemma_4,
        _describe_gemma_4,
        _proportion,
    ),
    "gemma4_text e": GgufCase(
        "gemma4",
        transformers.Gemma4TextConfig,
        {
            **_GEMMA_4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        _gemma_4,
        _describe_gemma_4,
        _proportion,
    ),
}


def build_model(case: GgufCase, *, mxfp4: bool = False) -> Any:
    """Make the library's model, with matrices that Q8_0 holds without rounding, or experts MXFP4."""
    torch.manual_seed(5)
    config = case.config(**case.sizes)
    library: Any = transformers.AutoModelForCausalLM
    model = library.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            if tensor.ndim == 1 or name.endswith("_bias"):
                tensor.add_((torch.randn(tensor.shape) * 100).round() / 1024)
            else:
                is_expert = mxfp4 and ".experts." in name
                tensor.copy_((_small_floats if is_expert else _whole_numbers)(tensor.shape))
            if name.endswith("A_log"):
                tensor.uniform_(-5, -1)
    return model


def _whole_numbers(shape: torch.Size) -> torch.Tensor:
    numbers = torch.randint(-127, 128, shape)
    numbers = torch.where(torch.rand(shape) < 0.5, 127 * numbers.sign().clamp(min=-1), numbers)
    numbers = torch.where(numbers == 0, 127, numbers)
    # The root of mean squares of such numbers is about 100.
    return numbers * 2.0 ** round(math.log2(shape[-1] ** -0.5 / 100))


def _small_floats(shape: torch.Size) -> torch.Tensor:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, *[6.0] * 7])
    numbers = magnitudes[torch.randint(0, len(magnitudes), shape)] * torch.randint(0, 2, shape).mul(2).sub(1)
    return numbers * 2.0 ** round(math.log2(shape[-1] ** -0.5 / 5))


def write_case(
    path: Path, case: GgufCase, model: Any, kind: str, *, shards: int = 1, rounds: bool = False
) -> Path:
    """Write ``model`` with all matrices in type ``kind``, and return the path of the first file.

    Unless it ``rounds``, the type must hold each value as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = dict(_converted(case, model))
    most = 0 if shards == 1 else -(-len(tensors) // shards)
    file = gguf.GGUFWriter(path, case.architecture, split_max_tensors=most)
    _describe_base(file, model.config)
    case.describe(file, model.config)
    _add_words(file, model.config.vocab_size)
    for name, tensor in tensors.items():
        chosen = gguf.GGMLQuantizationType[kind if _is_matrix(name, tensor, kind) else "F32"]
        values = np.ascontiguousarray(tensor.float().numpy())
        packed = gguf.quants.quantize(values, chosen)
        held = gguf.quants.dequantize(packed, chosen).reshape(values.shape)
        assert rounds or np.array_equal(held, values), name
        file.add_tensor(name, packed, raw_dtype=chosen)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path if shards == 1 else path.with_name(f"{path.stem}-00001-of-{shards:05}.gguf")


def _add_words(file: gguf.GGUFWriter, vocab_size: int) -> None:
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, "ab", *(f"<word{number}>" for number in range(vocab_size - len(letters) - 1))]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("llama-bpe")
    file.add_token_list(words)
    file.add_token_merges(["a b"])


def _is_matrix(name: str, tensor: torch.Tensor, kind: str) -> bool:
    if kind == "MXFP4" and not name.endswith("_exps.weight"):
        return False
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    stays = name.endswith((".bias", "ssm_conv1d.weight"))
    return tensor.ndim > 1 and tensor.shape[-1] % block == 0 and not stays


def _converted(case: GgufCase, model: Any) -> Changed:
    architecture = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and tied:
            continue
        for name, changed in case.change(own, tensor.detach(), model.config):
            theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert theirs or name.startswith("blk."), name
            yield theirs or name, changed
    yield from case.beside(model.config).items()
