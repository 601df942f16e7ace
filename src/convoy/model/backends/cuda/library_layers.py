"""Run any other decoder on the device: the library's own layers, over our pools and our attention.

As on the host, `load.load_modules` builds the modules of the stage, and our attention is registered by
name, as are our products of experts. Additions that a family needs come with the loaded modules, and
`layers` has the parts of single families. The weights pass through the host's memory in float32 and move to
the device one layer at a time. Ranks that hold whole experts are not captured: they ask the device which rows
are theirs, and a captured graph cannot wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from convoy.config.kernels import KernelForm, form_of
from convoy.errors import ModelError
from convoy.model.backends.cuda.batch import DeviceBatch, DeviceGroupBatch
from convoy.model.backends.cuda.kernels.attention import LOG2_E, attend
from convoy.model.backends.cuda.kernels.linears import round_linears, rounded_linear
from convoy.model.backends.cuda.kernels.pointwise import store, store_rows
from convoy.model.backends.cuda.kernels.sums import DeviceSums
from convoy.model.backends.cuda.layers.delta import DeviceDeltaNet, DeviceStatePool, SlotRows
from convoy.model.backends.cuda.layers.experts import EXPERTS_NAME
from convoy.model.backends.cuda.layers.latent import attend_latents
from convoy.model.backends.cuda.memory.pools import LayerPool
from convoy.model.backends.cuda.memory.weights import LoadProgress
from convoy.model.backends.cuda.options import BFLOAT16
from convoy.model.checkpoints.source import ModelSource
from convoy.model.layers.delta import GatedDeltaNet
from convoy.model.layers.experts import is_router
from convoy.model.layers.latent import LatentAttention
from convoy.model.layers.layer_inputs import takes_shared_kv
from convoy.model.layers.rope import RopeUse, Rotation, Rotations
from convoy.model.loading.load import load_modules
from convoy.model.loading.loaded import LoadedModules
from convoy.model.parallel.experts import OwnExperts
from convoy.plan.spec.sharding import WHOLE, Shard
from convoy.wire.messages.control import StageAssignment

ATTENTION_NAME = "convoy_cuda"
# Numbers that stay float32, with those of routers: small differences between them count.
_FLOAT32_NAMES = frozenset({"e_score_correction_bias", "A_log", "dt_bias", "taps"})


@dataclass(frozen=True)
class LayerStep:
    """Hold the inputs of one layer's attention or recurrence in a step."""

    pool: LayerPool
    group: DeviceGroupBatch
    tables: torch.Tensor

    @property
    def states(self) -> DeviceStatePool:
        """Return the slots of a recurrent layer."""
        return self.pool.states

    @property
    def slot_rows(self) -> SlotRows:
        """Return the step's rows for a recurrent layer."""
        return SlotRows(self.tables, self.group.rows, self.group.launches, self.pool.shape.group)

    def attend_latents(self, query: torch.Tensor, kept: torch.Tensor, scaling: float) -> torch.Tensor:
        """Store ``kept`` [T, 1, width], and return the attention [T, heads, rank] of ``query``."""
        pool, shape, group = self.pool.pool.keys, self.pool.shape, self.group
        store_rows(kept, pool, shape.block_size, group.slots)
        return attend_latents(
            *(query.to(pool.dtype), pool, replace(shape, scale=scaling)),
            tables=self.tables,
            rows=group.rows,
            launches=group.launches,
        )


def device_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the batch says who sees whom
    *,
    scaling: float,
    batch: Mapping[int, LayerStep],
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write K and V of the step, then attend. Shapes and names are as in `attention.packed_attention`."""
    step = batch[module.layer_idx]  # type: ignore[index]
    pool, group = step.pool.pool, step.group
    shape = replace(step.pool.shape, scale=float(scaling), softcap=softcap)
    store(key[0].transpose(0, 1), value[0].transpose(0, 1), pool, shape, group.slots)
    num_tokens = query.shape[2]
    queries = query[0].transpose(0, 1).reshape(num_tokens, -1).to(pool.keys.dtype)
    sinks = None if s_aux is None else s_aux.float() * LOG2_E
    out = attend(
        *(queries, pool, shape), tables=step.tables, rows=group.rows, launches=group.launches, sinks=sinks
    )
    return out.view(1, num_tokens, shape.num_heads, shape.value_dim), None


AttentionInterface.register(ATTENTION_NAME, device_attention)


class LibraryDecoder:
    """Run modules of the library, with the interface of `decoder.DeviceDecoder`."""

    def __init__(
        self,
        source: ModelSource,
        modules: LoadedModules,
        device: torch.device,
        dtype: torch.dtype,
        form: KernelForm = BFLOAT16,
    ) -> None:
        self._modules = modules
        self._dtype = dtype
        self._kv_sources = dict(source.spec.kv_sources)
        self._shares = takes_shared_kv(modules.layers.values())
        self.bytes_read = modules.bytes_read
        _move(modules, device, dtype)
        if form.bits:
            for layer in modules.layers.values():
                round_linears(layer, form, source.name)
            if modules.output is not None:
                own = form_of(form.otherwise) if form.otherwise else form
                modules.output = rounded_linear(modules.output, own, source.name)
        self.weight_bytes = modules.weight_bytes
        self._rotations = _rotations(modules, source.spec.max_context, device, dtype)

    def join(self, sums: DeviceSums) -> None:
        """Declare that the weights are slices, and connect them to the other ranks through ``sums``."""
        assert self._modules.ranks is not None
        self._modules.ranks.join(sums)

    @property
    def can_capture(self) -> bool:
        """Return whether a run launches the same kernels for all inputs, as a captured graph must."""
        parts = (part for layer in self._modules.layers.values() for part in layer.modules())
        return self._modules.layer_inputs is None and not any(isinstance(part, OwnExperts) for part in parts)

    @property
    def takes_tokens(self) -> bool:
        """Return whether layers need token ids."""
        return self._modules.layer_inputs is not None

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """Return the layers by their number in the whole model."""
        return self._modules.layers

    @property
    def owns_output(self) -> bool:
        return self._modules.output is not None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, hidden_size] of int32 token ids [T]."""
        assert self._modules.embedding is not None
        rows: torch.Tensor = self._modules.embedding(ids)
        scale = self._modules.embed_scale
        return (rows if scale is None else rows.float() * scale).to(self._dtype)

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        batch: DeviceBatch,
        pools: Mapping[int, LayerPool],
    ) -> torch.Tensor:
        """Return the hidden state [T, hidden_size] behind the last layer."""
        modules = self._modules
        steps = {
            number: LayerStep(pool, batch.groups[pool.group], batch.tables) for number, pool in pools.items()
        }
        # A layer that shares K/V reads the pool of its source layer.
        steps |= {layer: steps[of] for layer, of in self._kv_sources.items() if of in steps}
        arguments: dict[str, Any] = {"use_cache": False, "batch": steps}
        if self._shares:
            # Filled by the layers with K and V that later layers may read.
            arguments["shared_kv_states"] = {}
        inputs = {}
        if modules.layer_inputs is not None and ids is not None:
            inputs = {n: own.to(self._dtype) for n, own in modules.layer_inputs(ids).items()}
        turned = {
            use: (cos.index_select(0, batch.positions)[None], sin.index_select(0, batch.positions)[None])
            for use, (cos, sin) in self._rotations.items()
        }
        x = x[None]
        for number, layer in modules.layers.items():
            own = {"per_layer_input": inputs[number]} if number in inputs else {}
            x = layer(x, position_embeddings=turned[modules.ropes[number]], **arguments, **own)
        return x[0]

    def final_state(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to [M, hidden_size]."""
        norm = self._modules.norm
        assert norm is not None
        state: torch.Tensor = norm(x)
        return state

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the final norm and `lm_head` to [M, hidden_size]. Returns float32 [M, vocab_size]."""
        norm, head = self._modules.norm, self._modules.output
        assert norm is not None
        assert head is not None
        logits: torch.Tensor = head(norm(x)).float()
        scale, cap = self._modules.logit_scale, self._modules.logit_cap
        logits = logits if scale is None else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap


def load_library_decoder(
    source: ModelSource,
    assignment: StageAssignment,
    device: torch.device,
    dtype: torch.dtype,
    progress: LoadProgress | None,
    form: KernelForm = BFLOAT16,
    shard: Shard = WHOLE,
) -> LibraryDecoder:
    """Load the library's layers for ``assignment``. ``form`` is as in `memory.weights.load_weights`.

    Raises ModelError as `load_modules` does, for K/V that our kernels do not keep, and for experts that
    are to be rounded.
    """
    for group in source.spec.cache_groups:
        if not (group.attends or group.is_state):
            raise ModelError(
                f"{source.name}: {group.kind} state does not run on cuda yet", hint="run it on cpu"
            )
    modules = load_modules(source, assignment, packed=False, progress=progress, shard=shard)
    for number, layer in modules.layers.items():
        _configure(source, number, layer)
    return LibraryDecoder(source, modules, device, dtype, form)


def _configure(source: ModelSource, number: int, layer: nn.Module) -> None:
    found = False
    for name, part in list(layer.named_modules()):
        if isinstance(part, GatedDeltaNet):
            layer.set_submodule(name, DeviceDeltaNet(part))
        found = found or isinstance(part, (GatedDeltaNet, LatentAttention))
        if _scores_in_float32(part):
            part.register_forward_pre_hook(_in_float32)
        config: Any = getattr(part, "config", None)
        if config is not None:
            found = True
            config._attn_implementation = ATTENTION_NAME
            config._experts_implementation = EXPERTS_NAME
    if not found:
        raise ModelError(f"{source.name}: layer {number} does not support Convoy's attention on cuda")


def _scores_in_float32(part: nn.Module) -> bool:
    """Return whether ``part`` is a router with a bias, as of GPT-OSS.

    It chooses by its scores themselves. Other routers passed their certificates as the library computes them.
    """
    return is_router(part) and getattr(part, "bias", None) is not None


def _in_float32(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a router's inputs as its weights are kept: rounded scores of two experts are often equal."""
    return (inputs[0].float(), *inputs[1:])


def _move(modules: LoadedModules, device: torch.device, dtype: torch.dtype) -> None:
    embedding, output = modules.embedding, modules.output
    # Moving a module copies its weight, so a tied matrix must be tied again afterwards.
    tied = embedding is not None and output is not None and _address(embedding) == _address(output)
    for part in (*modules.layers.values(), embedding, modules.norm, output):
        if part is not None:
            _move_part(part, device, dtype)
    if tied:
        assert embedding is not None
        assert output is not None
        output.weight = embedding.weight
    if modules.layer_inputs is not None:
        modules.layer_inputs.to(device=device)


def _move_part(part: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    routers = {name for name, module in part.named_modules() if _scores_in_float32(module)}
    exact = {
        name: tensor.data.float()
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
        if name.rpartition(".")[2] in _FLOAT32_NAMES or name.rpartition(".")[0] in routers
    }
    part.to(device=device, dtype=dtype)
    for name, tensor in (*part.named_parameters(), *part.named_buffers()):
        if name in exact:
            tensor.data = exact[name].to(device)


def _address(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.data_ptr()


def _rotations(
    modules: LoadedModules, max_context: int, device: torch.device, dtype: torch.dtype
) -> dict[RopeUse, Rotation]:
    """Return cos and sin of all positions, [max_context, width], for each use."""
    uses: Iterable[RopeUse] = set(modules.ropes.values())
    found = Rotations(modules.rotary, max_context).look_up(uses, torch.arange(max_context), max_context - 1)
    return {use: (cos[0].to(device, dtype), sin[0].to(device, dtype)) for use, (cos, sin) in found.items()}
