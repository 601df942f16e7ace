"""Load the part of a model that a stage owns, as the model's own modules from `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from convoy.errors import ModelError
from convoy.model.attention import ATTENTION_NAME
from convoy.model.checkpoint import StoredTensor, read_tensors
from convoy.model.linear import FUSED_ACTIVATIONS, PackedLinear, PackedMlp
from convoy.model.source import ModelSource
from convoy.wire.messages import StageAssignment

LoadProgress = Callable[[int, int], None]
# They change their frequencies with the length of the batch, so a position would not have one value.
_UNSTEADY_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class LoadedModules:
    """A stage's modules. ``layers`` are absolute: {12: ..., 13: ...}; what is not owned is None."""

    embedding: torch.Tensor | None  # [vocab_size, hidden_size]
    layers: dict[int, nn.Module]
    norm: nn.Module | None
    output: nn.Module | None  # lm_head
    rotary: nn.Module
    bytes_read: int
    weight_bytes: int


def load_modules(
    source: ModelSource, assignment: StageAssignment, *, packed: bool, progress: LoadProgress | None
) -> LoadedModules:
    """Read just the tensors of the assignment and build its modules in float32.

    ``packed`` gives exact mode's linears. Raises ModelError for a span outside the model, and for missing, misshapen or
    unreadable tensors, naming them.
    """
    if not 0 <= assignment.start <= assignment.end <= source.spec.num_layers:
        raise ModelError(
            f"{source.name} has layers 0 to {source.spec.num_layers - 1}, "
            f"asked for {assignment.start} to {assignment.end - 1}"
        )
    config = _config(source, assignment)
    wanted = _owned_tensors(source, assignment)
    total = sum(tensor.num_bytes for tensor in wanted)
    state: dict[str, torch.Tensor] = {}
    bytes_read = 0
    for stored, tensor in read_tensors(wanted):
        state[stored.name] = tensor
        bytes_read += tensor.nbytes
        if progress is not None:
            progress(bytes_read, total)
    model = _build(source, assignment, config, state)
    stored_dtype = next((t.dtype for n, t in state.items() if n.endswith("embed_tokens.weight")), None)
    del state
    return _take_modules(model, source, assignment, packed, stored_dtype, bytes_read)


def _config(source: ModelSource, assignment: StageAssignment) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(source.path), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise ModelError(f"{source.name}: config.json is not accepted: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{source.name}: model type {source.spec.family!r} has no decoder in transformers")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _UNSTEADY_ROPE:
        raise ModelError(f"{source.name}: rope type {rope['rope_type']!r} is not supported")
    if not assignment.output:
        # the library would look for an lm_head to tie
        config.tie_word_embeddings = False
    return config


def _owned_tensors(source: ModelSource, assignment: StageAssignment) -> list[StoredTensor]:
    prefixes = [f"model.layers.{layer}." for layer in range(assignment.start, assignment.end)]
    tied = source.spec.tied_embeddings
    if assignment.embed or (assignment.output and tied):
        prefixes.append("model.embed_tokens.")
    if assignment.output:
        prefixes.append("model.norm.")
        if not tied:
            prefixes.append("lm_head.")
    return [t for name, t in source.tensors.items() if name.startswith(tuple(prefixes))]


def _build(
    source: ModelSource, assignment: StageAssignment, config: Any, state: dict[str, torch.Tensor]
) -> nn.Module:
    whole = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    keep_embedding = assignment.embed or (assignment.output and source.spec.tied_embeddings)

    class OwnedPart(whole):  # type: ignore[misc, valid-type]
        """The model's own class without what this stage does not own: those modules never get memory."""

        _keys_to_ignore_on_load_unexpected = [".*"]  # noqa: RUF012 - the library's own form

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in range(len(self.model.layers)):
                if not assignment.start <= layer < assignment.end:
                    self.model.layers[layer] = nn.Identity()
            if not keep_embedding:
                self.model.embed_tokens = nn.Identity()
            if not assignment.output:
                self.model.norm, self.lm_head = nn.Identity(), nn.Identity()

    with _quiet_library():
        try:
            model, report = OwnedPart.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=torch.float32,
                attn_implementation=ATTENTION_NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
            )
        except (RuntimeError, ValueError, KeyError) as error:
            raise ModelError(f"{source.name} cannot be built from its config.json: {error}") from error
    _check_report(source, report)
    return model.eval()  # type: ignore[no-any-return]


def _check_report(source: ModelSource, report: dict[str, Any]) -> None:
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ModelError(f"{source.name}: {name} has shape {list(found)}, expected {list(expected)}")
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{source.name}: the checkpoint has no tensor {missing[0]}{more}",
            hint="a shard is missing or the directory is of another model",
        )


@contextmanager
def _quiet_library() -> Iterator[None]:
    """No progress bars and no reports from the library: only the command line prints."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _take_modules(
    model: Any,
    source: ModelSource,
    assignment: StageAssignment,
    packed: bool,
    stored_dtype: torch.dtype | None,
    bytes_read: int,
) -> LoadedModules:
    layers: dict[int, nn.Module] = {
        layer: model.model.layers[layer] for layer in range(assignment.start, assignment.end)
    }
    norm, output = (model.model.norm, model.lm_head) if assignment.output else (None, None)
    embedding = model.model.embed_tokens.weight.detach() if assignment.embed else None
    rotary = model.model.rotary_emb
    tied = source.spec.tied_embeddings and assignment.output
    del model
    if packed:
        for layer in layers.values():
            pack_layer(layer)
        if output is not None:
            output = PackedLinear(output.weight, output.bias)
            if embedding is not None and tied and stored_dtype is not None:
                # the packed output cannot be looked up by row; what was stored in two bytes is kept in two
                embedding = embedding.to(stored_dtype)
    modules = [*layers.values(), *(m for m in (norm, output) if m is not None)]
    _own_memory(modules)
    if embedding is not None and not (tied and not packed):
        embedding = embedding.clone()
    counted = {p.data_ptr(): p.nbytes for module in modules for p in module.parameters()}
    if embedding is not None:
        counted[embedding.data_ptr()] = embedding.nbytes
    packed_bytes = sum(
        part.weight_bytes for module in modules for part in module.modules() if isinstance(part, PackedLinear)
    )
    weight_bytes = sum(counted.values()) + packed_bytes
    return LoadedModules(embedding, layers, norm, output, rotary, bytes_read, weight_bytes)


def _own_memory(modules: list[nn.Module]) -> None:
    """Copy what still points into the mapped file: a file that changes later must not change a running model."""
    for module in modules:
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.clone()


def pack_layer(layer: nn.Module) -> None:
    """Replace a layer's linears by packed ones, in place, and its activation by the one fused into its linear.

    Raises ModelError for an activation that has no fused form.
    """
    for name, part in list(layer.named_modules()):
        if all(
            isinstance(getattr(part, key, None), nn.Linear) for key in ("gate_proj", "up_proj", "down_proj")
        ):
            activation = str(part.config.hidden_act)  # type: ignore[union-attr]
            if activation not in FUSED_ACTIVATIONS:
                raise ModelError(
                    f"the activation {activation!r} has no exact form here",
                    hint='set kernel = "plain-f32"',
                )
            mlp = PackedMlp(part.gate_proj, part.up_proj, part.down_proj, activation)  # type: ignore[arg-type]
            layer.set_submodule(name, mlp)
            del mlp
    for name, part in list(layer.named_modules()):
        if isinstance(part, nn.Linear):
            layer.set_submodule(name, PackedLinear(part.weight, part.bias))
