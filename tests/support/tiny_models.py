"""Tiny random models, made through transformers, and stages joined in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step

Prompt = Callable[..., list[int]]
Threads = Callable[[int], None]
_COMMON: dict[str, Any] = {"max_position_embeddings": 1024, "vocab_size": 105, "num_hidden_layers": 5}
_ODD = {"hidden_size": 40, "intermediate_size": 44, "num_attention_heads": 4, "head_dim": 8}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PHI: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
_PLAIN: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
}
_GEMMA: dict[str, Any] = {
    **_COMMON,
    **_ODD,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_QWEN_3_5: dict[str, Any] = {
    **_COMMON,
    **_ODD,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "full_attention_interval": 3,
    # A state of few tokens may nearly cancel out. Its norm would then be only rounding.
    "rms_norm_eps": 0.01,
    "linear_key_head_dim": 40,
    "linear_value_head_dim": 56,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_DEEPSEEK_V4: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 6,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "sliding_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
    "mlp_layer_types": ["hash_moe", "hash_moe", *["moe"] * 4],
    "hidden_size": 40,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 8,
    "index_head_dim": 8,
    "index_topk": 6,
    "hc_mult": 3,
    "pad_token_id": None,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "odd": ("Llama", {**_COMMON, **_ODD, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "even": (
        "Llama",
        {
            **_COMMON,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "vocab_size": 256,
            "num_hidden_layers": 6,
            "tie_word_embeddings": False,
            "rope_parameters": _LLAMA3,
        },
    ),
    "biased": (
        "Llama",
        {
            **_COMMON,
            **_ODD,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
        },
    ),
    "mistral": ("Mistral", {**_COMMON, **_ODD, "num_key_value_heads": 1, "sliding_window": 24}),
    "qwen2": ("Qwen2", {**_COMMON, **_ODD, "hidden_size": 32, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {**_COMMON, **_ODD, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "mixed": (
        "Qwen3",
        {
            **_COMMON,
            **_ODD,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": [
                f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")
            ],
        },
    ),
    "qwen3_5": ("Qwen3_5Text", {**_QWEN_3_5, "tie_word_embeddings": True}),
    "qwen3_5 nested": (
        "Qwen3_5",
        {
            "text_config": {
                **_QWEN_3_5,
                "layer_types": [*["linear_attention", "full_attention"] * 2, "linear_attention"],
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 40,
                "num_position_embeddings": 16,
            },
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {
            **_QWEN_3_5,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "phi3": (
        "Phi3",
        {
            **_PHI,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "sliding_window": 40,
        },
    ),
    "phi4": ("Phi3", {**_PHI, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 300}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_COMMON,
            **_ODD,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    # Heads of 32, as K/V of 8 bits needs them.
    "gemma3": ("Gemma3Text", {**_GEMMA, "head_dim": 32, "sliding_window_pattern": 3}),
    "gemma3 capped": ("Gemma3Text", {**_GEMMA, "final_logit_softcapping": 2.0, "layer_types": _MIXED}),
    "gemma3 nested": (
        "Gemma3",
        {
            "text_config": {**_GEMMA, "sliding_window_pattern": 3},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_COMMON,
            **_ODD,
            "intermediate_size": 24,
            "num_key_value_heads": 2,
            "sliding_window": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            **_GEMMA,
            "layer_types": _MIXED,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma4 e": (
        "Gemma4Text",
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", *_MIXED[1:], "sliding_attention", "full_attention"],
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 105,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "apertus": ("Apertus", _PLAIN),
    "arcee": ("Arcee", {**_PLAIN, "attention_bias": True, "mlp_bias": True}),
    "cohere": ("Cohere", {**_PLAIN, "use_qk_norm": True, "pad_token_id": 0}),
    "cohere2": ("Cohere2", {**_PLAIN, "sliding_window": 20, "pad_token_id": 0}),
    "ernie4_5": ("Ernie4_5", {**_PLAIN, "head_dim": 8}),
    "gemma": ("Gemma", {**_PLAIN, "head_dim": 16}),
    "glm": ("Glm", {**_PLAIN, "head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {**_PLAIN, "head_dim": 16, "pad_token_id": 0}),
    "glm4_moe": ("Glm4Moe", {**_DEEPSEEK, "head_dim": 16, "num_key_value_heads": 2, "use_qk_norm": True}),
    "granite": (
        "Granite",
        {
            **_PLAIN,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
    ),
    "mixtral": ("Mixtral", {**_PLAIN, "num_local_experts": 4, "sliding_window": 30}),
    "olmo2": ("Olmo2", {**_PLAIN, "pad_token_id": 0}),
    "olmo3": ("Olmo3", {**_PLAIN, "pad_token_id": 0, "sliding_window": 20}),
    "olmoe": ("Olmoe", {**_PLAIN, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **_PLAIN,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "seed_oss": ("SeedOss", {**_PLAIN, "head_dim": 16}),
    "smollm3": ("SmolLM3", {**_PLAIN, "pad_token_id": 0}),
    "deepseek_v3": ("DeepseekV3", {**_DEEPSEEK}),
    "deepseek_v4": ("DeepseekV4", _DEEPSEEK_V4),
    "deepseek_v3 flat": ("DeepseekV3", {**_DEEPSEEK, "q_lora_rank": None, "rope_interleave": False}),
}
# The library names these families' models without the "Text" of their configurations.
_CONFIGS = {
    "Gemma3Text": "Gemma3",
    "Gemma4Text": "Gemma4",
    "Qwen3_5Text": "Qwen3_5",
    "Qwen3_5MoeText": "Qwen3_5Moe",
}


def build_config(kind: str, **more: Any) -> Any:
    """Return the library's configuration of a kind, with some options set otherwise."""
    family, options = KINDS[kind]
    return getattr(transformers, f"{family}Config")(**(options | more))


def build_model(kind: str, **more: Any) -> Any:
    """Return the whole model of transformers, random but lively: initial weights make attention near
    uniform. ``more`` sets some options of the kind otherwise.
    """
    family, options = KINDS[kind]
    config = build_config(kind, **more)
    torch.manual_seed(7)
    head = "ConditionalGeneration" if "text_config" in options else "CausalLM"
    model = getattr(transformers, f"{_CONFIGS.get(family, family)}For{head}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # A state that forgets all tokens but one may be nearly zero. Its norm would then be only
                # rounding.
                parameter.uniform_(-5, -1)
            elif name.endswith("bias") or parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            else:
                fan_in = parameter[0].numel() if "conv1d" in name else parameter.shape[1]
                parameter.normal_(std=fan_in**-0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), config.n_routed_experts).argsort()[:, : buffer.shape[1]])
            elif name in model.state_dict():
                buffer.add_(0.1 * torch.randn(buffer.shape))
    return model


@dataclass
class Chain:
    """Join stages in one process, with the part of a scheduler that hands out blocks.

    ``rings``: the most blocks of a table, by cache group; None: no bound.
    """

    # Each is a `Stage`, or has as much of one as this class uses.
    stages: Sequence[Any]
    num_blocks: int = 128
    rings: Sequence[int | None] = ()
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rings = self.rings or [None] * len(self.stages[0].block_bytes)
        # Scattered, so that no test passes only because a sequence's blocks lie side by side.
        generator = torch.Generator().manual_seed(3)
        self._free = [torch.randperm(self.num_blocks, generator=generator).tolist() for _ in self.rings]
        self._numbers = itertools.count()
        self.released: list[int] = []
        for stage in self.stages:
            stage.make_pools(self.num_blocks)

    def release(self, sequence: int) -> None:
        """Release a sequence with the next step."""
        self.released.append(sequence)
        for free, blocks in zip(self._free, self.tables.pop(sequence), strict=True):
            free.extend(blocks)
        del self.lengths[sequence]

    def run(self, *rows: tuple[int, Sequence[int]], start: int | None = None) -> list[torch.Tensor]:
        """Return the logits [n, vocab] of each (sequence, tokens) row, appended to the sequence (or at
        ``start``).
        """
        released, self.released = self.released, []
        grants: list[BlockGrant] = []
        wire_rows = []
        for sequence, tokens in rows:
            first = self.lengths.get(sequence, 0) if start is None else start
            grants += self._grants(sequence, -(-(first + len(tokens)) // 16))
            wire_rows.append(Row(sequence, first, len(tokens), len(tokens)))
            self.lengths[sequence] = first + len(tokens)
        step = Step(next(self._numbers), released, grants, wire_rows, b"")
        ids = torch.tensor([t for _, part in rows for t in part], dtype=torch.int64)
        hidden: torch.Tensor | None = None
        for stage in self.stages:
            hidden = stage.run(step, hidden, ids if stage.takes_tokens else None)
        assert hidden is not None
        owner = next(stage for stage in self.stages if stage.assignment.output)
        logits = owner.output(owner.select(step, hidden))
        sizes = [row.num_tokens for row in wire_rows]
        return list(torch.split(logits, sizes))

    def _grants(self, sequence: int, num_blocks: int) -> Iterator[BlockGrant]:
        tables = self.tables.setdefault(sequence, [[] for _ in self.rings])
        for group, (table, ring) in enumerate(zip(tables, self.rings, strict=True)):
            missing = (num_blocks if ring is None else min(num_blocks, ring)) - len(table)
            if missing > 0:
                blocks = [self._free[group].pop() for _ in range(missing)]
                table.extend(blocks)
                yield BlockGrant.append(sequence, group, blocks)


class Models:
    """Make directories of tiny models, and stages and references of them, each once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._references: dict[tuple[str, torch.dtype], Any] = {}
        self._stages: dict[tuple[str, StageOptions, tuple[int, ...]], list[HostStage]] = {}

    def directory(self, kind: str, *, dtype: torch.dtype = torch.float32) -> Path:
        path = self._root / f"{kind}-{str(dtype).removeprefix('torch.')}"
        if not path.exists():
            model = build_model(kind).to(dtype)
            model.save_pretrained(path)
            if dtype == torch.float32:
                # What `from_pretrained` would make of the files.
                model.set_attn_implementation("eager")
                self._references[kind, dtype] = model
        return path

    def source(self, kind: str, *, dtype: torch.dtype = torch.float32) -> ModelSource:
        return ModelSource.resolve(str(self.directory(kind, dtype=dtype)))

    def reference(
        self, kind: str, tokens: Sequence[int], *, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the logits [T, vocab] of transformers' own forward, with eager attention."""
        directory = self.directory(kind)
        if (kind, dtype) not in self._references:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation="eager"
            )
            self._references[kind, dtype] = model.eval()
        with torch.no_grad():
            logits: torch.Tensor = self._references[kind, dtype](torch.tensor([list(tokens)])).logits[0]
        return logits

    def distance(self, kind: str, tokens: Sequence[int], found: torch.Tensor, *, allowed: float) -> float:
        """Return how far ``found`` is from the library's logits at most.

        Both round, each in another order, and the order depends on the processor. So beyond ``allowed`` the
        library's float64 is the judge, as in `convoy verify`: logits that are no further from it than twice
        the library's own float32 count as ``allowed``.
        """
        expected = self.reference(kind, tokens)
        apart = float((found - expected).abs().max())
        if apart <= allowed:
            return apart
        exact = self.reference(kind, tokens, dtype=torch.float64)
        own = float((expected.double() - exact).abs().max())
        return allowed if float((found.double() - exact).abs().max()) <= 2 * own else apart

    def chain(
        self,
        kind: str,
        *cuts: int,
        kernel: str = "exact-f32",
        kv_dtype: str = "auto",
        ring_tokens: int | None = None,
    ) -> Chain:
        """Return a fresh chain cut before these layers; the first stage embeds, the last has the output.

        With ``ring_tokens`` windows keep no more than rows of so many tokens need. Chains of one kind and
        cut share their stages: a new chain ends the use of the earlier one.
        """
        options = StageOptions(kernel=kernel, require_tags=False, kv_dtype=kv_dtype)
        key = kind, options, cuts
        if key not in self._stages:
            source = self.source(kind)
            limits = [0, *cuts, source.spec.num_layers]
            self._stages[key] = [
                HostStage.load(
                    source,
                    StageAssignment(f"m{i}", start, end, i == 0, i == len(limits) - 2),
                    options,
                )
                for i, (start, end) in enumerate(itertools.pairwise(limits))
            ]
        if ring_tokens is None:
            return Chain(self._stages[key])
        groups = self.source(kind).spec.cache_groups
        return Chain(self._stages[key], rings=[group.ring_blocks(16, ring_tokens) for group in groups])
