"""Tiny checkpoints in the formats of others, written and unpacked with numpy: src has no part in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file

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
    "tied": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    ),
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
}


@dataclass(frozen=True)
class Written:
    """A quantised checkpoint, and what it says once it is unpacked, saved as float32."""

    quantised: Path
    dense: Path
    original: Path  # before it was quantised


class Writer:
    """Makes one checkpoint: what is stored, and what that means."""

    def __init__(self, model: Any) -> None:
        self.config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
        self.state: State = {n: t.detach().clone().float() for n, t in model.state_dict().items()}
        self.stored: State = {}
        self.dense: State = {}

    def linears(self) -> list[str]:
        """The names of all matrices in layers but routers."""
        return [
            n
            for n, t in self.state.items()
            if n.startswith("model.layers.") and t.dim() >= 2 and n.endswith(".weight") and ".gate.w" not in n
        ]

    def put(self, name: str, dense: Array, **stored: torch.Tensor) -> None:
        """``name`` stands as ``stored``, by suffixes in place of ``weight``, for the values ``dense``."""
        module = name.removesuffix("weight")
        self.stored.update({f"{module}{suffix}": tensor for suffix, tensor in stored.items()})
        self.dense[name] = torch.from_numpy(np.ascontiguousarray(dense.astype(np.float32)))
        del self.state[name]

    def rest(self) -> None:
        """What was not quantised, as it is."""
        self.stored.update(self.state)
        self.dense.update(self.state)


Quantise = Callable[[Writer], None]


def library_model(kind: str) -> Any:
    """As `support.tiny_models` has them: random but lively, of sizes that groups divide."""
    family, sizes = MODELS[kind]
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def write(root: Path, kind: str, quantise: Quantise) -> Written:
    """Both forms of one model, and the original, under ``root``."""
    model = library_model(kind)
    model.save_pretrained(root / "original")
    writer = Writer(model)
    quantise(writer)
    writer.rest()
    plain = {k: v for k, v in writer.config.items() if k not in {"quantization", "quantization_config"}}
    _save(root / "dense", plain, writer.dense)
    _save(root / "quantised", writer.config, writer.stored)
    return Written(root / "quantised", root / "dense", root / "original")


def _save(directory: Path, config: Mapping[str, Any], state: State) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    tied = config.get("tie_word_embeddings")
    kept = {n: t.contiguous() for n, t in state.items() if not (tied and n.startswith("lm_head."))}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def pack(codes: Array, bits: int) -> Array:
    """Rows of codes as uint32 words, the first code in the lowest bits; through Python's own integers."""
    *lead, width = codes.shape
    words = []
    for row in codes.reshape(-1, width).tolist():
        whole = sum(int(code) << (bits * place) for place, code in enumerate(row))
        words.append(np.frombuffer(whole.to_bytes(width * bits // 8, "little"), "<u4"))
    return np.array(words, np.uint32).reshape(*lead, -1)


def bfloat16(values: Array) -> Array:
    """Rounded to the nearest bfloat16, as float32."""
    rounded: Array = torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).float().numpy()
    return rounded


def affine(values: Array, bits: int, group: int) -> tuple[Array, Array, Array, Array]:
    """Codes, scales and biases, which are bfloat16 numbers, and the values that these stand for."""
    groups = values.reshape(*values.shape[:-1], -1, group).astype(np.float32)
    low, high = groups.min(-1), groups.max(-1)
    scales, biases = bfloat16((high - low) / (2**bits - 1)), bfloat16(low)
    codes = np.clip(np.rint((groups - biases[..., None]) / scales[..., None]), 0, 2**bits - 1)
    dense = (codes * scales[..., None] + biases[..., None]).reshape(values.shape)
    return codes.reshape(values.shape), scales, biases, dense


def mlx(bits: int = 4, group: int = 64, own: Mapping[str, int] | None = None) -> Quantise:
    """As `mlx_lm.convert` does: all linears and the embedding; ``own`` bits for modules by their suffix."""

    def quantise(writer: Writer) -> None:
        settings: dict[str, Any] = {"group_size": group, "bits": bits}
        names = [*writer.linears(), "model.embed_tokens.weight"]
        names += [] if writer.config["tie_word_embeddings"] else ["lm_head.weight"]
        for name in names:
            module = name.removesuffix(".weight")
            chosen = next((b for suffix, b in (own or {}).items() if module.endswith(suffix)), bits)
            if chosen != bits:
                settings[module] = {"group_size": group, "bits": chosen}
            values = writer.state[name].numpy()
            codes, scales, biases, dense = affine(values, chosen, group)
            writer.put(
                name,
                bfloat16(dense) if "embed" in name else dense,
                weight=torch.from_numpy(pack(codes.astype(np.int64), chosen)),
                scales=torch.from_numpy(scales).to(torch.bfloat16),
                biases=torch.from_numpy(biases).to(torch.bfloat16),
            )
        writer.config["quantization"] = writer.config["quantization_config"] = settings

    return quantise
