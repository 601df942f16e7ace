"""Assemble a stage's weights: the layers of each family, the embedding and the output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from convoy.errors import ModelError
from convoy.model.backends.mlx.layers.delta import DeltaNet
from convoy.model.backends.mlx.layers.experts import (
    Choose,
    Experts,
    FeedForward,
    GroupedChoice,
    MlpBesideExperts,
    SharedAndChosen,
    SoftmaxChoice,
    clamped_gate,
    plain_gate,
)
from convoy.model.backends.mlx.layers.latent import MlxLatentAttention
from convoy.model.backends.mlx.layers.layer import HeadAttention, LayerNorms, MlxLayerWeights
from convoy.model.backends.mlx.layers.matrices import ACTIVATIONS, GatedMlp, Matrix
from convoy.model.backends.mlx.layers.rotation import MlxRotations
from convoy.model.backends.mlx.slices import RankSlicer
from convoy.model.backends.mlx.weights import LoadProgress, TensorReader
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.tied import check_tied
from convoy.model.loading.library_config import text_config
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import FOUR_NORMS, MlxForm
from convoy.plan.spec.registry import FAMILIES
from convoy.plan.spec.sharding import WHOLE, Shard
from convoy.wire.messages.control import StageAssignment


@dataclass
class MlxWeights:
    """Hold a stage's weights. Parts that the stage does not own are None."""

    layers: dict[int, MlxLayerWeights]
    rotations: MlxRotations
    embedding: Matrix | None
    embedding_scale: float
    norm: mx.array | None
    head: Matrix | None
    # The bound of logits, or 0.
    logits_cap: float
    eps: float
    bytes_read: int

    @property
    def num_bytes(self) -> int:
        """Return the resident bytes. A tied matrix that is stored once counts once."""
        held = [array for layer in self.layers.values() for array in layer.arrays]
        for part in (self.embedding, None if self.head is self.embedding else self.head):
            held += [] if part is None else part.arrays
        norm_bytes = 0 if self.norm is None else int(self.norm.nbytes)
        return sum(int(array.nbytes) for array in held) + norm_bytes


def load_weights(
    source: ModelSource,
    assignment: StageAssignment,
    dtype: str,
    progress: LoadProgress | None = None,
    kept: MlxWeights | None = None,
    *,
    shard: Shard = WHOLE,
) -> MlxWeights:
    """Read only the tensors of the assignment, and keep a rank's slice. Layers in ``kept`` are used again.

    Raises ModelError for a span outside the model, and for missing or unreadable tensors.
    """
    num_layers = source.spec.num_layers
    if not 0 <= assignment.start <= assignment.end <= num_layers:
        raise ModelError(
            f"{source.name} has layers 0 to {num_layers - 1}, "
            f"asked for {assignment.start} to {assignment.end - 1}"
        )
    if assignment.output:
        check_tied(source)
    config = text_config(source)
    old = {} if kept is None else kept.layers
    wanted = range(assignment.start, assignment.end)
    slicer = RankSlicer(source.spec, shard)
    new = [layer for layer in wanted if layer not in old]
    reader = TensorReader(source, assignment, dtype, progress, layers=new, slicer=slicer)
    assembler = LayerAssembler(source, config, reader)
    layers = {layer: old[layer] if layer in old else assembler.layer(layer) for layer in wanted}
    embedding = slicer.vocabulary(reader.matrix("model.embed_tokens")) if assignment.embed else None
    norm, head = None, None
    if assignment.output:
        norm = assembler.norm("model.norm")
        tied = source.spec.tied_embeddings
        own = "model.embed_tokens" if tied else "lm_head"
        shares = tied and embedding is not None
        head = embedding if shares else slicer.vocabulary(reader.matrix(own))
    return MlxWeights(
        layers,
        MlxRotations(source.name, config, _turned_widths(source, wanted)),
        embedding,
        config.hidden_size**0.5 if assembler.form.scaled_embeddings else 1.0,
        norm,
        head,
        float(getattr(config, "final_logit_softcapping", None) or 0.0),
        float(config.rms_norm_eps),
        reader.bytes_read,
    )


def _turned_widths(source: ModelSource, layers: range) -> dict[int, int]:
    """Return the width of the heads that a layer's rotation is for; layers with a state have none."""
    return {
        layer: group.head_dim - (group.value_dim if group.is_latent else 0)
        for group in source.spec.cache_groups
        if not group.is_state
        for layer in group.layers
        if layer in layers
    }


class LayerAssembler:
    """Read decoder layers, as the family's row and the library's configuration describe them."""

    def __init__(self, source: ModelSource, config: Any, reader: TensorReader) -> None:
        self._family = FAMILIES[source.spec.family]
        self.form = self._family.mlx or MlxForm()
        self._config = config
        self._counts = ConfigReader(source.config, source.name)
        self._reader = reader
        self._eps = float(config.rms_norm_eps)
        word = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        self._activate = ACTIVATIONS[word or "silu"]
        self._groups = {layer: group for group in source.spec.cache_groups for layer in group.layers}
        # `mlx_lm.convert` adds the one itself where it transposes convolutions.
        self._plus_one = self._family.norm == "one plus weight" and not any(
            name.endswith("conv1d.weight") and tensor.shape[-1] == 1 < tensor.shape[1]
            for name, tensor in source.tensors.items()
        )

    def norm(self, module: str) -> mx.array:
        """Return the factors of a norm."""
        return self._reader.plain(f"{module}.weight", plus_one=self._plus_one)

    def layer(self, number: int) -> MlxLayerWeights:
        """Return a layer. Raises ModelError for missing tensors."""
        prefix = f"model.layers.{number}."
        group = self._groups[number]
        if group.is_state:
            mixer: HeadAttention | MlxLatentAttention | DeltaNet = self._delta_net(f"{prefix}linear_attn.")
        elif group.is_latent:
            mixer = self._latent(f"{prefix}self_attn.", group)
        else:
            mixer = self._heads(f"{prefix}self_attn.", group)
        feed_forward = self._feed_forward(prefix)
        norms = self._norms(prefix, has_own=isinstance(feed_forward, MlpBesideExperts))
        scalar = self._reader.optional(f"{prefix}layer_scalar")
        return MlxLayerWeights(norms, mixer, feed_forward, scalar, self._eps)

    def _norms(self, prefix: str, *, has_own: bool) -> LayerNorms:
        if self._family.num_norms == len(FOUR_NORMS):
            before, behind, middle, after = (f"{prefix}{name}" for name in FOUR_NORMS)
            own = None if has_own else self.norm(middle)
            return LayerNorms(self.norm(before), self.norm(behind), own, self.norm(after))
        names = ("input_layernorm", "post_attention_layernorm")
        first, second = (self.norm(f"{prefix}{name}") for name in names)
        return LayerNorms(first, None, second, None)

    def _heads(self, prefix: str, group: CacheGroup) -> HeadAttention:
        reader, form, dim = self._reader, self.form, group.head_dim
        same = group.window is None and getattr(self._config, "attention_k_eq_v", False)
        divisor = getattr(self._config, form.query_scale_key) if form.query_scale_key else dim
        has_norms = self._family.qk_norm
        return HeadAttention(
            q=reader.linear(f"{prefix}q_proj"),
            k=reader.linear(f"{prefix}k_proj"),
            v=None if same else reader.linear(f"{prefix}v_proj"),
            q_norm=self.norm(f"{prefix}q_norm") if has_norms else None,
            k_norm=self.norm(f"{prefix}k_norm") if has_norms else None,
            v_norm=mx.ones((dim,), reader.dtype) if form.value_norms else None,
            sinks=self._of_heads(reader.plain(f"{prefix}sinks")) if self._family.sinks else None,
            out=reader.linear(f"{prefix}o_proj"),
            head_dim=dim,
            scale=1.0 if form.value_norms else float(divisor) ** -0.5,
            eps=self._eps,
            gated=self._family.gated,
        )

    def _of_heads(self, each: mx.array) -> mx.array:
        """Return what belongs to this rank's heads of ``each`` [heads, ...]."""
        return each[self._reader.slicer.share(each.shape[0])]

    def _latent(self, prefix: str, group: CacheGroup) -> MlxLatentAttention:
        reader, config = self._reader, self._config
        rank, value = group.value_dim, config.v_head_dim
        expand = reader.plain(f"{prefix}kv_b_proj.weight").reshape(group.num_heads, -1, rank)
        expand = self._of_heads(expand)
        key_up, value_up = mx.contiguous(expand[:, :-value]), mx.contiguous(expand[:, -value:].swapaxes(1, 2))
        mx.eval(key_up, value_up)
        has_two = config.q_lora_rank is not None
        return MlxLatentAttention(
            q=reader.linear(f"{prefix}q_a_proj" if has_two else f"{prefix}q_proj"),
            q_norm=self.norm(f"{prefix}q_a_layernorm") if has_two else None,
            q_up=reader.linear(f"{prefix}q_b_proj") if has_two else None,
            latent=reader.linear(f"{prefix}kv_a_proj_with_mqa"),
            latent_norm=self.norm(f"{prefix}kv_a_layernorm"),
            key_up=key_up,
            value_up=value_up,
            out=reader.linear(f"{prefix}o_proj"),
            scale=_latent_scale(config),
            interleaved=bool(config.rope_interleave),
        )

    def _delta_net(self, prefix: str) -> DeltaNet:
        reader = self._reader
        taps = reader.plain(f"{prefix}conv1d.weight")
        return DeltaNet(
            inputs=reader.linear(f"{prefix}in_proj_qkv"),
            gate=reader.linear(f"{prefix}in_proj_z"),
            share=reader.linear(f"{prefix}in_proj_b"),
            step=reader.linear(f"{prefix}in_proj_a"),
            out=reader.linear(f"{prefix}out_proj"),
            taps=taps.reshape(taps.shape[0], -1).T,
            dt_bias=reader.plain(f"{prefix}dt_bias", mx.float32),
            decay=-mx.exp(reader.plain(f"{prefix}A_log", mx.float32)),
            norm=reader.plain(f"{prefix}norm.weight", mx.float32),
            eps=self._eps,
        )

    def _feed_forward(self, prefix: str) -> FeedForward:
        """Return experts in the layers whose file has a router."""
        reader, mlp = self._reader, f"{prefix}mlp."
        if reader.has(f"{prefix}router.proj.weight"):
            return self._beside(prefix)
        router = next((name for name in ("gate", "router") if reader.has(f"{mlp}{name}.weight")), "")
        if not router:
            return self._mlp(mlp)
        chosen = self._experts(f"{mlp}{router}", f"{mlp}experts.", "num_experts_per_tok")
        shared = next(
            (n for n in ("shared_expert", "shared_experts") if reader.has(f"{mlp}{n}.up_proj.weight")), ""
        )
        if not shared:
            return chosen
        gate = f"{mlp}shared_expert_gate"
        own_gate = reader.linear(gate) if reader.has(f"{gate}.weight") else None
        return SharedAndChosen(chosen, self._mlp(f"{mlp}{shared}."), own_gate)

    def _mlp(self, prefix: str) -> GatedMlp:
        gate, up, down = (self._reader.linear(f"{prefix}{part}_proj") for part in ("gate", "up", "down"))
        return GatedMlp(gate, up, down, self._activate)

    def _beside(self, prefix: str) -> MlpBesideExperts:
        names = ("pre_feedforward_layernorm", "post_feedforward_layernorm_1")
        of_experts = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        before, behind, before_experts, behind_experts = (
            self.norm(f"{prefix}{name}") for name in (*names, *of_experts)
        )
        scale = self._reader.plain(f"{prefix}router.scale") * self._config.hidden_size**-0.5
        return MlpBesideExperts(
            self._mlp(f"{prefix}mlp."),
            self._experts(f"{prefix}router.proj", f"{prefix}experts.", "top_k_experts"),
            (before, behind, before_experts, behind_experts),
            scale,
            self._eps,
        )

    def _experts(self, router_name: str, prefix: str, count_key: str) -> Experts:
        reader, config = self._reader, self._config
        router = reader.linear(router_name)
        num_experts = router.matrix.arrays[0].shape[0]
        num_chosen = self._counts.count(count_key, most=num_experts, default=getattr(config, count_key))
        scales = f"{router_name.removesuffix('proj')}per_expert_scale"
        kept = [reader.plain(scales, mx.float32)] if reader.has(scales) else []
        if self._family.router == "best groups":
            kept = [reader.plain(f"{router_name}.e_score_correction_bias", mx.float32)]
            choose: Choose = GroupedChoice(
                num_chosen,
                bool(config.norm_topk_prob),
                config.n_group,
                config.topk_group,
                float(config.routed_scaling_factor),
                kept[0],
            )
        else:
            # A softmax over the chosen is one over all whose weights are made to add up to 1.
            is_normed = self._family.router != "softmax of all" or getattr(config, "norm_topk_prob", True)
            choose = SoftmaxChoice(num_chosen, bool(is_normed), kept[0] if kept else None)
        gate, up, down = reader.stacks(prefix, transposed=self._family.transposed_experts)
        apply_gate = plain_gate(self._activate)
        if self._family.expert_gate == "clamped":
            apply_gate = clamped_gate(float(config.swiglu_alpha), float(config.swiglu_limit))
        own = reader.slicer.own_experts(num_experts)
        return Experts(router, choose, gate, up, down, apply_gate, tuple(kept), own)


def _latent_scale(config: Any) -> float:
    """Return the scale of scores over latents, which some rotations of the type yarn enlarge."""
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    rope = config.rope_parameters
    factor, enlarged = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not enlarged or factor <= 1:
        return scale
    return scale * math.pow(0.1 * enlarged * math.log(factor) + 1.0, 2)
