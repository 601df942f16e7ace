"""Tiny checkpoints in other projects' formats, written and unpacked with numpy alone: no code of src is
used, apart from `unpack`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file

from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource

Array = npt.NDArray[Any]
State = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "tie_word_embeddings": False}),
    "llama3": (
        "Llama",
        {
            **SIZES,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen2": ("Qwen2", {**SIZES, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 64}),
    "tied": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOss",
        {
            **SIZES,
            "intermediate_size": 64,
            "sliding_window": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{key: value for key, value in SIZES.items() if key != "head_dim"},
            "num_key_value_heads": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
    "gemma3": ("Gemma3Text", {**SIZES, "hidden_size": 64, "sliding_window": 20, "sliding_window_pattern": 2}),
    "gemma4": (
        "Gemma4Text",
        {
            **SIZES,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 20,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {
            **SIZES,
            "full_attention_interval": 3,
            # As in `tiny_models`.
            "rms_norm_eps": 0.01,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4",
        {
            "vocab_size": 128,
            "max_position_embeddings": 512,
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_attention_heads": 4,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "o_groups": 2,
            "o_lora_rank": 32,
            "index_n_heads": 8,
            "index_head_dim": 8,
            "index_topk": 6,
            "hc_mult": 3,
            "pad_token_id": None,
        },
    ),
}


@dataclass(frozen=True)
class Written:
    """Hold the paths of a quantised checkpoint and of its unpacked float32 values."""

    quantised: Path
    dense: Path


class Writer:
    """Make one checkpoint: the stored tensors, and the values that they stand for."""

    def __init__(self, model: Any) -> None:
        self.config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
        self.state: State = {}
        for name, tensor in model.state_dict().items():
            stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            one_by_one = stacked and self.config["model_type"] != "gpt_oss"
            self.state.update(_apart(name, tensor) if one_by_one else {name: tensor.detach().clone().float()})
        self.stored: State = {}
        self.dense: State = {}

    def linears(self) -> list[str]:
        """Return the names of all matrices in layers except routers."""
        return [
            n
            for n, t in self.state.items()
            if n.startswith("model.layers.") and t.dim() == 2 and n.endswith(".weight") and ".gate.w" not in n
        ]

    def put(self, name: str, dense: Array, **stored: torch.Tensor) -> None:
        """Store ``name`` as the tensors ``stored``, by suffixes in place of ``weight``, for the values
        ``dense``.
        """
        module = name.removesuffix("weight")
        self.stored.update({f"{module}{suffix}": tensor for suffix, tensor in stored.items()})
        self.dense[name] = torch.from_numpy(np.ascontiguousarray(dense.astype(np.float32)))
        del self.state[name]

    def rest(self) -> None:
        """Store the tensors that were not quantised unchanged."""
        self.stored.update(self.state)
        self.dense.update(self.state)


def _apart(name: str, stack: torch.Tensor) -> State:
    """Separate stacked experts, as checkpoints store them."""
    prefix, _, kind = name.rpartition(".")
    parts = {"gate_proj": stack.chunk(2, 1)[0], "up_proj": stack.chunk(2, 1)[1]}
    if kind == "down_proj":
        parts = {kind: stack}
    return {
        f"{prefix}.{e}.{part}.weight": experts[e].detach().clone().float()
        for part, experts in parts.items()
        for e in range(stack.shape[0])
    }


Quantise = Callable[[Writer], None]


def library_model(kind: str, **more: Any) -> Any:
    """Make a random but lively model, as `support.tiny_models` does, with sizes that groups divide.

    ``more`` sets some of the kind's options otherwise.
    """
    family, sizes = MODELS[kind]
    sizes = sizes | more
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def write(root: Path, kind: str, quantise: Quantise, **more: Any) -> Written:
    """Write both forms of one of `MODELS` under ``root``, with ``more`` options."""
    return save_written(root, Writer(library_model(kind, **more)), quantise)


def save_written(root: Path, writer: Writer, quantise: Quantise) -> Written:
    """Quantise the tensors of ``writer``, and save both forms under ``root``."""
    quantise(writer)
    writer.rest()
    plain = {k: v for k, v in writer.config.items() if k not in {"quantization", "quantization_config"}}
    _save(root / "dense", plain, writer.dense)
    _save(root / "quantised", writer.config, writer.stored)
    return Written(root / "quantised", root / "dense")


def unpack(source: ModelSource, directory: Path) -> None:
    """Write the values that src reads from a quantised checkpoint as a plain float32 one."""
    names = source.layout.shapes(source.tensors)
    state = {name: read_tensor(source, name).float() for name in names}
    plain = {k: v for k, v in source.config.items() if k not in {"quantization", "quantization_config"}}
    _save(directory, plain, state)


def _save(directory: Path, config: Mapping[str, Any], state: State) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    tied = config.get("tie_word_embeddings")
    kept = {n: t.contiguous() for n, t in state.items() if not (tied and n.startswith("lm_head."))}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def pack(codes: Array, bits: int) -> Array:
    """Pack rows of codes into uint32 words, the first code in the lowest bits, through Python's own
    integers.
    """
    *lead, width = codes.shape
    words, texts = [], [format(code, f"0{bits}b") for code in range(1 << bits)]
    for row in codes.reshape(-1, width).tolist():
        whole = int("".join([texts[int(code)] for code in reversed(row)]), 2)
        words.append(np.frombuffer(whole.to_bytes(width * bits // 8, "little"), "<u4"))
    return np.array(words, np.uint32).reshape(*lead, -1)


def bfloat16(values: Array) -> Array:
    """Round to the nearest bfloat16, and return float32."""
    rounded: Array = torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).float().numpy()
    return rounded


def affine(values: Array, bits: int, group: int) -> tuple[Array, Array, Array, Array]:
    """Return codes, bfloat16 scales and biases, and the values that these stand for."""
    groups = values.reshape(*values.shape[:-1], -1, group).astype(np.float32)
    low, high = groups.min(-1), groups.max(-1)
    scales, biases = bfloat16((high - low) / (2**bits - 1)), bfloat16(low)
    codes = np.clip(np.rint((groups - biases[..., None]) / scales[..., None]), 0, 2**bits - 1)
    dense = (codes * scales[..., None] + biases[..., None]).reshape(values.shape)
    return codes.reshape(values.shape), scales, biases, dense


def mlx(bits: int = 4, group: int = 64, own: Mapping[str, int] | None = None) -> Quantise:
    """Quantise as `mlx_lm.convert` does: all linears and the embedding; ``own`` bits for modules by their
    suffix.
    """

    def quantise(writer: Writer) -> None:
        settings: dict[str, Any] = {"group_size": group, "bits": bits}
        names = [*writer.linears(), "model.embed_tokens.weight"]
        names += [] if writer.config["tie_word_embeddings"] else ["lm_head.weight"]
        for name in names:
            module = name.removesuffix(".weight")
            chosen = next((b for suffix, b in (own or {}).items() if module.endswith(suffix)), bits)
            if chosen != bits:
                # Mixed recipes write null for the usual size.
                size = None if group == 64 else group
                settings[module] = {"group_size": size, "bits": chosen, "mode": "affine"}
            values = writer.state[name].numpy()
            codes, scales, biases, dense = affine(values, chosen, group)
            writer.put(
                name,
                bfloat16(dense) if "embed" in name else dense,
                weight=torch.from_numpy(pack(codes.astype(np.int64), chosen)),
                scales=torch.from_numpy(scales).to(torch.bfloat16),
                biases=torch.from_numpy(biases).to(torch.bfloat16),
            )
        _stack(writer.stored)
        # The dtype of scales, biases and embedding rows.
        writer.config["dtype"] = "bfloat16"
        writer.config["quantization"] = writer.config["quantization_config"] = settings

    return quantise


def _stack(stored: State) -> None:
    """Stack single experts as MLX stores them."""
    experts: dict[str, list[torch.Tensor]] = {}
    for name in [name for name in stored if ".experts." in name]:
        prefix, _, rest = name.partition(".experts.")
        experts.setdefault(f"{prefix}.switch_mlp.{rest.partition('.')[2]}", []).append(stored.pop(name))
    stored.update({name: torch.stack(parts) for name, parts in experts.items()})


_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _small_floats(scaled: Array) -> tuple[Array, Array]:
    """Round to E2M1. Return bytes of two codes, the first in the lower half, and the values."""
    codes = np.abs(np.abs(scaled)[..., None] - _MAGNITUDES).argmin(-1)
    dense = np.sign(scaled) * _MAGNITUDES[codes]
    codes = codes + 8 * (scaled < 0)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8), dense


def _power_blocks(values: Array) -> tuple[Array, Array, Array]:
    """Return bytes [..., blocks, 16], exponents [..., blocks] and values of blocks of 32 along a row."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 6)).astype(np.int64)
    packed, dense = _small_floats(blocks / 2.0 ** exponents[..., None])
    return packed, exponents + 127, (dense * 2.0 ** exponents[..., None]).reshape(values.shape)


def mxfp4(writer: Writer) -> None:
    """Quantise as GPT-OSS does: only experts, [experts, rows, blocks, 16], and the exponents of blocks of
    32.
    """
    for name in [n for n in writer.state if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        values = writer.state[name].numpy().transpose(0, 2, 1)
        packed, exponents, dense = _power_blocks(values)
        module = name.removesuffix("weight")
        writer.stored[f"{module}_blocks"] = torch.from_numpy(packed)
        writer.stored[f"{module}_scales"] = torch.from_numpy(exponents.astype(np.uint8))
        writer.dense[name] = torch.from_numpy(
            np.ascontiguousarray(dense.transpose(0, 2, 1).astype(np.float32))
        )
        del writer.state[name]
    writer.config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
    }


def mlx_mixtral(writer: Writer) -> None:
    """Quantise Mixtral as `mlx_lm.convert` does, under its publisher's names of blocks."""
    mlx(4, 32)(writer)
    for tensors in (writer.stored, writer.state, writer.dense):
        for name in [name for name in tensors if ".mlp." in name]:
            tensors[name.replace(".mlp.", ".block_sparse_moe.")] = tensors.pop(name)
    for name in [name for name in writer.dense if ".experts." in name]:
        prefix, _, rest = name.partition("_proj.")
        stem, _, part = prefix.rpartition(".")
        theirs = {"gate": "w1", "up": "w3", "down": "w2"}[part]
        writer.dense[f"{stem}.{theirs}.{rest}"] = writer.dense.pop(name)


def _small_groups(values: Array, mode: str) -> tuple[Array, torch.Tensor, Array]:
    """Return bytes of codes along rows, bytes of scales, and values of MXFP4, MXFP8 or NVFP4."""
    if mode == "mxfp4":
        packed, exponents, dense = _power_blocks(values)
        return packed.reshape(len(values), -1), torch.from_numpy(exponents.astype(np.uint8)), dense
    groups = values.reshape(len(values), -1, 16 if mode == "nvfp4" else 32)
    greatest = np.abs(groups).max(-1)
    if mode == "nvfp4":
        stored, scales = float8(greatest / 6)
        packed, dense = _small_floats(groups / np.maximum(scales, 1e-9)[..., None])
        codes = packed.reshape(len(values), -1)
    else:
        exponents = np.ceil(np.log2(greatest / 448)).astype(np.int64)
        scales, stored = 2.0**exponents, torch.from_numpy((exponents + 127).astype(np.uint8))
        rounded, dense = float8(groups / scales[..., None])
        codes = rounded.view(torch.uint8).numpy().reshape(len(values), -1)
    found = (dense.astype(np.float32) * scales[..., None].astype(np.float32)).reshape(values.shape)
    return codes, stored.view(torch.uint8), found


def mlx_floats(mode: str) -> Quantise:
    """Quantise as `mlx_lm.convert` does with a mode of small floats."""

    def quantise(writer: Writer) -> None:
        for name in [*writer.linears(), "model.embed_tokens.weight"]:
            codes, scales, dense = _small_groups(writer.state[name].numpy(), mode)
            words = torch.from_numpy(np.ascontiguousarray(codes).view(np.uint32))
            writer.put(name, dense, weight=words, scales=scales)
        _stack(writer.stored)
        bits, group = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
        settings = {"group_size": group, "bits": bits, "mode": mode}
        writer.config["quantization"] = writer.config["quantization_config"] = settings

    return quantise


def mlx_gpt_oss(writer: Writer) -> None:
    """Quantise as `mlx_lm.convert` does GPT-OSS: MXFP4 experts under its own names, the rest in 8 bits."""
    for name in [n for n in writer.state if ".experts." in n]:
        values = writer.state.pop(name)
        module, _, leaf = name.rpartition(".")
        if leaf.endswith("_bias"):
            parts = {leaf.removesuffix("_bias"): values}
            if leaf.startswith("gate_up"):
                parts = {"gate_proj": values[..., ::2], "up_proj": values[..., 1::2]}
            writer.stored |= {f"{module}.{part}.bias": one.contiguous() for part, one in parts.items()}
            writer.dense[name] = values
            continue
        packed, exponents, dense = _power_blocks(values.numpy().transpose(0, 2, 1))
        words = torch.from_numpy(packed.reshape(*dense.shape[:2], -1).copy()).view(torch.uint32)
        halves = {leaf: slice(None)}
        if leaf.startswith("gate_up"):
            halves = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        for part, rows in halves.items():
            scales = torch.from_numpy(exponents.astype(np.uint8))
            stored = {"weight": words[:, rows], "scales": scales[:, rows]}
            writer.stored |= {f"{module}.{part}.{kind}": one.contiguous() for kind, one in stored.items()}
        writer.dense[name] = torch.from_numpy(dense.transpose(0, 2, 1).astype(np.float32))
    kept = {name: writer.stored.pop(name) for name in list(writer.stored)}
    mlx(8, 64)(writer)
    writer.stored |= kept
    settings = writer.config["quantization"]
    own = {name.removesuffix(".scales"): {"group_size": 32, "bits": 4, "mode": "mxfp4"} for name in kept}
    settings |= {name: value for name, value in own.items() if f"{name}.scales" in kept}


def mlx_latents(writer: Writer) -> None:
    """Quantise as `mlx_lm.convert` does DeepSeek: keys and values of its latents are matrices of heads."""
    heads, fixed = writer.config["num_attention_heads"], writer.config["qk_nope_head_dim"]
    kept = {}
    for name in [n for n in writer.state if n.endswith("kv_b_proj.weight")]:
        whole = writer.state.pop(name).numpy().reshape(heads, -1, writer.config["kv_lora_rank"])
        halves = {"embed_q": whole[:, :fixed].transpose(0, 2, 1), "unembed_out": whole[:, fixed:]}
        found = {}
        for part, values in halves.items():
            codes, scales, biases, found[part] = affine(values, 4, 32)
            module = name.replace("kv_b_proj.weight", part)
            kept[f"{module}.weight"] = torch.from_numpy(pack(codes.astype(np.int64), 4))
            kept[f"{module}.scales"] = torch.from_numpy(scales).to(torch.bfloat16)
            kept[f"{module}.biases"] = torch.from_numpy(biases).to(torch.bfloat16)
        rows = np.concatenate((found["embed_q"].transpose(0, 2, 1), found["unembed_out"]), 1)
        writer.dense[name] = torch.from_numpy(rows.reshape(-1, rows.shape[-1]).astype(np.float32))
    mlx(4, 32)(writer)
    writer.stored |= kept


def nvfp4(method: str) -> Quantise:
    """Quantise to 4-bit floats with 8-bit scales, as ModelOpt or llm-compressor do."""

    def quantise(writer: Writer) -> None:
        for name in writer.linears():
            values = writer.state[name].numpy()
            groups = values.reshape(values.shape[0], -1, 16)
            factor = np.float32(np.abs(values).max() / (6 * 448))
            stored, coarse = float8(np.abs(groups).max(-1) / 6 / factor)
            # ModelOpt stores the factor, and llm-compressor what it divides by.
            kept = factor if method == "modelopt" else np.float32(1) / factor
            scales = coarse * kept if method == "modelopt" else coarse / kept
            packed, dense = _small_floats(groups / np.maximum(scales, 1e-9)[..., None])
            pairs = torch.from_numpy(packed.reshape(values.shape[0], -1))
            parts = {"weight_scale": stored, "input_scale": torch.tensor(1.0)}
            if method == "modelopt":
                parts |= {"weight": pairs, "weight_scale_2": torch.tensor(kept)}
            else:
                parts |= {"weight_packed": pairs, "weight_global_scale": torch.tensor([kept])}
            found = (dense.astype(np.float32) * scales[..., None]).reshape(values.shape)
            writer.put(name, found, **parts)
        if method == "modelopt":
            writer.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
            return
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
        _compressed_config(writer, "nvfp4-pack-quantized", {**weights, "group_size": 16})

    return quantise


# The quantiles of a normal distribution, as QLoRA's paper gives them (appendix E).
_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def nf4(*, double: bool) -> Quantise:
    """Quantise as bitsandbytes does, in blocks of 64; ``double`` quantises the blocks' scales too."""

    def quantise(writer: Writer) -> None:
        table, steps = np.array(_NF4, np.float32), np.linspace(-1, 1, 256, dtype=np.float32)
        for name in writer.linears():
            values = writer.state[name].numpy()
            blocks = values.reshape(-1, 64)
            largest = np.abs(blocks).max(-1)
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*values.shape]}
            parts = {"quant_map": torch.from_numpy(table.copy()), "absmax": torch.from_numpy(largest)}
            if double:
                offset = np.float32(largest.mean())
                outer = np.array(
                    [np.abs(part - offset).max() for part in np.split(largest, range(256, len(largest), 256))]
                )
                spread = outer.repeat(256)[: len(largest)].astype(np.float32)
                codes = np.abs((largest - offset)[:, None] / spread[:, None] - steps).argmin(-1)
                largest = steps[codes] * spread + offset
                state |= {"nested_blocksize": 256, "nested_offset": float(offset), "nested_dtype": "float32"}
                parts |= {
                    "absmax": torch.from_numpy(codes.astype(np.uint8)),
                    "nested_absmax": torch.from_numpy(outer.astype(np.float32)),
                    "nested_quant_map": torch.from_numpy(steps.copy()),
                }
            codes = np.abs((blocks / largest[:, None])[..., None] - table).argmin(-1)
            dense = bfloat16((table[codes] * largest[:, None]).reshape(values.shape))
            flat = codes.reshape(-1).astype(np.uint8)
            text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
            stored = {f"weight.{part}": one for part, one in parts.items()}
            stored["weight.quant_state.bitsandbytes__nf4"] = torch.from_numpy(text)
            packed = torch.from_numpy(flat[0::2] * 16 + flat[1::2]).unsqueeze(1)
            writer.put(name, dense, weight=packed, **stored)
        writer.config["quantization_config"] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double,
        }

    return quantise


def deepseek_v4(writer: Writer) -> None:
    """Quantise as DeepSeek V4's publisher does: experts of 4-bit floats, other matrices in squares."""
    for word, own in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        for name in [n for n in writer.state if ".experts." in n and n.endswith(f"{word}.weight")]:
            writer.state[name.replace(word, own)] = writer.state.pop(name)
    ends = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight")
    names = [n for n in writer.state if n.startswith("model.layers.") and n.endswith(ends)]
    for name in [n for n in names if "compressor" not in n]:
        values = writer.state[name].numpy()
        if ".experts." in name:
            packed, exponents, dense = _power_blocks(values)
            weight = torch.from_numpy(packed.reshape(values.shape[0], -1)).view(torch.int8)
            scales = torch.from_numpy(exponents.astype(np.uint8)).view(torch.float8_e8m0fnu)
        else:
            exponent = int(np.ceil(np.log2(np.abs(values).max() / 448)))
            weight, dense = float8(values / 2.0**exponent)
            dense = dense * np.float32(2.0**exponent)
            grid = np.full((-(-values.shape[0] // 128), -(-values.shape[1] // 128)), exponent + 127, np.uint8)
            scales = torch.from_numpy(grid).view(torch.float8_e8m0fnu)
        writer.put(name, dense, weight=weight, scale=scales)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    writer.config["quantization_config"] = settings


def float8(values: Array) -> tuple[torch.Tensor, Array]:
    """Round to E4M3. Return that and its values."""
    rounded = torch.from_numpy(values.astype(np.float32)).to(torch.float8_e4m3fn)
    found: Array = rounded.float().numpy()
    return rounded, found


def fp8(block: tuple[int, int] | None, scale_shape: str = "block") -> Quantise:
    """Quantise in DeepSeek's squares; without ``block`` with a scale for each row or for the matrix."""

    def quantise(writer: Writer) -> None:
        for name in writer.linears():
            values = writer.state[name].numpy()
            rows, width = values.shape
            tile = block or ((1, width) if scale_shape == "row" else (rows, width))
            grid = np.zeros((-(-rows // tile[0]), -(-width // tile[1])), np.float32)
            dense = np.zeros(values.shape, np.float32)
            stored = torch.zeros(values.shape, dtype=torch.float8_e4m3fn)
            for i, j in np.ndindex(grid.shape):
                part = np.s_[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
                grid[i, j] = np.abs(values[part]).max() / 448
                stored[part], found = float8(values[part] / grid[i, j])
                dense[part] = found * grid[i, j]
            suffix = "weight_scale_inv" if block else "weight_scale"
            scales = torch.from_numpy(grid if block or scale_shape == "row" else grid.reshape(()))
            writer.put(name, dense, **{"weight": stored, suffix: scales, "input_scale": torch.tensor(1.0)})
        settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        writer.config["quantization_config"] = settings | (
            {"weight_block_size": list(block)} if block else {}
        )

    return quantise


def _grouped(values: Array, bits: int, group: int, *, symmetric: bool) -> tuple[Array, Array, Array, Array]:
    """Return codes from 0 on [rows, width], scales and zeros [rows, groups], and the values that they
    stand for.
    """
    groups = values.reshape(values.shape[0], -1, group)
    top = 2**bits - 1
    if symmetric:
        scales = np.abs(groups).max(-1) * 2 / top
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / top
        zeros = np.clip(np.rint(-low / scales), 1, top).astype(np.int64)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, top).astype(np.int64)
    dense = ((codes - zeros[..., None]) * scales[..., None]).reshape(values.shape)
    return codes.reshape(values.shape), scales, zeros, dense


def _words(codes: Array, bits: int) -> torch.Tensor:
    return torch.from_numpy(pack(codes, bits).view(np.int32))


def compressed(bits: int, group: int | None, *, symmetric: bool = True, shuffled: bool = False) -> Quantise:
    """Pack integers as llm-compressor does. ``group`` None gives a scale for each row."""

    def quantise(writer: Writer) -> None:
        for name in writer.linears():
            values = writer.state[name].numpy()
            width = values.shape[1]
            order = np.random.default_rng(5).permutation(width) if shuffled else np.arange(width)
            codes, scales, zeros, dense = _grouped(
                values[:, order], bits, group or width, symmetric=symmetric
            )
            back = np.argsort(order)
            stored = {
                "weight_packed": _words(codes[:, back], bits),
                "weight_scale": torch.from_numpy(scales).to(torch.float16),
                "weight_shape": torch.tensor(values.shape),
            }
            if not symmetric:
                stored["weight_zero_point"] = _words(zeros.T, bits).T
            if shuffled:
                stored["weight_g_idx"] = torch.from_numpy((back // (group or width)).astype(np.int32))
            writer.put(name, dense[:, back], **stored)
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": "group" if group else "channel",
            "group_size": group,
        }
        _compressed_config(writer, "pack-quantized", weights)

    return quantise


def compressed_float8(writer: Writer) -> None:
    """Quantise to llm-compressor's eight-bit floats, with a scale for each row."""
    fp8(None, "row")(writer)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}
    _compressed_config(writer, "float-quantized", weights)


def compressed_powers(mode: str) -> Quantise:
    """Quantise to llm-compressor's MXFP4 or MXFP8, with powers of two in bytes."""

    def quantise(writer: Writer) -> None:
        for name in writer.linears():
            codes, scales, dense = _small_groups(writer.state[name].numpy(), mode)
            stored = torch.from_numpy(np.ascontiguousarray(codes))
            parts = (
                {"weight_packed": stored} if mode == "mxfp4" else {"weight": stored.view(torch.float8_e4m3fn)}
            )
            writer.put(name, dense, weight_scale=scales, **parts)
        bits, form = (4, "mxfp4-pack-quantized") if mode == "mxfp4" else (8, "mxfp8-quantized")
        weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": "group"}
        _compressed_config(writer, form, {**weights, "group_size": 32})

    return quantise


def compressed_mixed(writer: Writer) -> None:
    """Quantise attention to 4 bits and the rest to 8, for targets that are patterns."""
    kept = {name: writer.state.pop(name) for name in writer.linears() if ".mlp." in name}
    groups: dict[str, Any] = {}
    for target, bits, group in (("re:.*self_attn.*", 4, 32), ("re:.*mlp\\..*_proj$", 8, None)):
        compressed(bits, group)(writer)
        (own,) = writer.config["quantization_config"]["config_groups"].values()
        groups[f"group_{len(groups)}"] = {**own, "targets": [target]}
        writer.state.update(kept)
        kept = {}
    # As for scales of keys and values: a group without weights.
    groups["group_2"] = {"targets": ["LlamaAttention"], "weights": None}
    writer.config["quantization_config"]["config_groups"] = groups


def _compressed_config(writer: Writer, form: str, weights: Mapping[str, Any]) -> None:
    writer.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
        "ignore": ["lm_head"],
    }


def gptq(bits: int, group: int, *, version: str = "gptq", shuffled: bool = False) -> Quantise:
    """Pack inputs in words; zeros less one in the first version; ``shuffled`` is "act order"."""

    def quantise(writer: Writer) -> None:
        for name in writer.linears():
            values = writer.state[name].numpy()
            width = values.shape[1]
            order = np.random.default_rng(6).permutation(width) if shuffled else np.arange(width)
            back = np.argsort(order)
            codes, scales, zeros, dense = _grouped(values[:, order], bits, group, symmetric=False)
            writer.put(
                name,
                dense[:, back],
                qweight=_words(codes[:, back], bits).T,
                qzeros=_words(zeros.T - (1 if version == "gptq" else 0), bits),
                scales=torch.from_numpy(scales.T.copy()).to(torch.float16),
                g_idx=torch.from_numpy((back // group).astype(np.int32)),
            )
        writer.config["quantization_config"] = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": shuffled,
            "sym": False,
            # Later versions of the writer have the second name.
            "checkpoint_format" if version == "gptq" else "format": version,
            "dynamic": {"-:.*lm_head.*": {}},
        }

    return quantise


def awq(group: int) -> Quantise:
    """Pack outputs in words, in the format's own order of places."""
    # For each place of a word, from the lowest on, the output that stands there.
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(codes: Array) -> torch.Tensor:
        return _words(codes.reshape(codes.shape[0], -1, 8)[:, :, places].reshape(codes.shape), 4)

    def quantise(writer: Writer) -> None:
        for name in writer.linears():
            values = writer.state[name].numpy()
            codes, scales, zeros, dense = _grouped(values, 4, group, symmetric=False)
            writer.put(
                name,
                dense,
                qweight=words(codes.T),
                qzeros=words(zeros.T),
                scales=torch.from_numpy(scales.T.copy()).to(torch.float16),
            )
        writer.config["quantization_config"] = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
        }

    return quantise


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(root: Path, writer: Writer, kind: str, tokenizer: Mapping[str, Any] | None = None) -> Written:
    """Write as llama.cpp's converter and quantiser do, through their own package; ``kind`` for all
    matrices.
    """
    architecture, config = writer.config["model_type"], writer.config
    root.mkdir(parents=True, exist_ok=True)
    path = root / "model.gguf"
    file = gguf.GGUFWriter(path, architecture)
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_block_count(config["num_hidden_layers"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(config["num_attention_heads"])
    file.add_head_count_kv(config["num_key_value_heads"])
    file.add_key_length(config["head_dim"])
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config["rope_parameters"]["rope_type"] == "llama3":
        file.add_tensor("rope_freqs.weight", _llama3_factors(config))
    if tokenizer is not None:
        file.add_tokenizer_model("gpt2")
        file.add_tokenizer_pre(tokenizer.get("pre", "llama-bpe"))
        if "template" in tokenizer:
            file.add_chat_template(tokenizer["template"])
        file.add_token_list(tokenizer["tokens"])
        file.add_token_types([1] * len(tokenizer["tokens"]))
        file.add_token_merges(tokenizer["merges"])
        file.add_eos_token_id(tokenizer["eos"])
    for name, tensor in list(writer.state.items()):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        _put_gguf(file, writer, name, tensor.numpy(), kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    _save(root / "dense", config, writer.dense)
    return Written(path, root / "dense")


def _put_gguf(file: Any, writer: Writer, name: str, values: Array, kind: str) -> None:
    parts = name.split(".")
    theirs = GGUF_NAMES.get(name) or f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:-1])]}.{parts[-1]}"
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(parts[-2])
    chosen = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
    packed = gguf.quants.quantize(values, chosen)
    dense = gguf.quants.dequantize(packed, chosen)
    writer.dense[name] = torch.from_numpy(dense.astype(np.float32).copy())
    if writer.config["model_type"] == "llama" and heads is not None:
        # Rows of the two halves of each head in turn.
        count = writer.config[heads]
        packed = packed.reshape(count, 2, -1, packed.shape[-1]).swapaxes(1, 2).reshape(packed.shape)
    file.add_tensor(theirs, packed, raw_dtype=chosen)


def _llama3_factors(config: Mapping[str, Any]) -> Array:
    """Compute the factors as llama.cpp's converter does."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    factors = []
    for place in range(0, dim, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (place / dim)
        if length < old / high:
            factors.append(1.0)
        elif length > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
