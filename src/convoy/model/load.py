"""Load the part of a model that a stage owns, as the model's own modules from `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from convoy.errors import ModelError
from convoy.model.attention import ATTENTION_NAME, packed_attention
from convoy.model.checkpoint import StoredTensor, map_tensor
from convoy.model.exact import make_layer_exact, make_output_exact
from convoy.model.library import LIBRARY
from convoy.model.linear import PackedLinear
from convoy.model.owned import owned_tensors
from convoy.model.source import ModelSource
from convoy.model.synthetic import draw_tensor
from convoy.wire.messages import StageAssignment

LoadProgress = Callable[[int, int], None]
# They change their frequencies with the length of the batch, so a position would not have one value.
_UNSTEADY_ROPE = {"dynamic", "longrope"}
AttentionInterface.register(ATTENTION_NAME, packed_attention)


@dataclass(frozen=True)
class _Part:
    """What is to be read: all that a stage owns, or what it lacks of that."""

    layers: frozenset[int]
    embed: bool
    output: bool


@dataclass
class LoadedModules:
    """A stage's modules; what it does not own is None."""

    embedding: nn.Embedding | None
    layers: dict[int, nn.Module]  # by their number in the whole model
    norm: nn.Module | None
    output: nn.Module | None  # lm_head
    rotary: nn.Module
    fused_attention: bool  # the layers take rotations spread over heads
    bytes_read: int

    def parts(self) -> list[nn.Module]:
        """Everything with weights."""
        return [
            *self.layers.values(),
            *(p for p in (self.embedding, self.norm, self.output) if p is not None),
        ]

    def narrow(self, assignment: StageAssignment) -> None:
        """Free what ``assignment`` does not own.

        Embedding and output stay only together and unchanged: what one of them is depends on the other where
        they are tied.
        """
        for layer in [i for i in self.layers if not assignment.start <= i < assignment.end]:
            del self.layers[layer]
        held = self.embedding is not None, self.output is not None
        if held != (assignment.embed, assignment.output):
            self.embedding = self.norm = self.output = None

    @property
    def weight_bytes(self) -> int:
        """Resident bytes; a tied matrix that is stored once counts once."""
        plain = {p.data_ptr(): p.nbytes for part in self.parts() for p in part.parameters()}
        packed = [
            m.weight_bytes for part in self.parts() for m in part.modules() if isinstance(m, PackedLinear)
        ]
        return sum(plain.values()) + sum(packed)


def load_modules(
    source: ModelSource,
    assignment: StageAssignment,
    *,
    packed: bool,
    progress: LoadProgress | None,
    kept: LoadedModules | None = None,
) -> LoadedModules:
    """Read just the tensors of the assignment and build its modules in float32.

    ``packed`` gives exact mode's layers. Of ``kept``, loaded earlier from the same source in the same form,
    what is owned still is used again, and the rest freed first. Raises ModelError for a span outside the
    model, and for missing, misshapen or unreadable tensors, naming them.
    """
    if not 0 <= assignment.start <= assignment.end <= source.spec.num_layers:
        raise ModelError(
            f"{source.name} has layers 0 to {source.spec.num_layers - 1}, "
            f"asked for {assignment.start} to {assignment.end - 1}"
        )
    if kept is not None:
        kept.narrow(assignment)
    part = _lacking(assignment, kept)
    if kept is not None and not (part.layers or part.embed or part.output):
        kept.bytes_read = 0
        return kept
    config = _config(source, part)
    wanted = owned_tensors(source, part.layers, embed=part.embed, output=part.output)
    total = sum(tensor.num_bytes for tensor in wanted)
    state: dict[str, torch.Tensor] = {}
    bytes_read = 0
    for stored in wanted:
        state[stored.name] = _tensor(source, stored)
        bytes_read += stored.num_bytes
        if progress is not None:
            progress(bytes_read, total)
    model = _build(source, part, config, state)
    stored_dtype = next((t.dtype for n, t in state.items() if n.endswith("embed_tokens.weight")), None)
    del state
    fresh = _take_modules(model, stored_dtype, embed=part.embed, bytes_read=bytes_read, packed=packed)
    return fresh if kept is None else _joined(kept, fresh)


def _lacking(assignment: StageAssignment, kept: LoadedModules | None) -> _Part:
    layers = frozenset(range(assignment.start, assignment.end))
    if kept is None:
        return _Part(layers, assignment.embed, assignment.output)
    ends = kept.embedding is None and kept.output is None
    return _Part(layers - kept.layers.keys(), assignment.embed and ends, assignment.output and ends)


def _joined(kept: LoadedModules, fresh: LoadedModules) -> LoadedModules:
    layers = kept.layers | fresh.layers
    ends = kept if fresh.embedding is None and fresh.output is None else fresh
    return LoadedModules(
        embedding=ends.embedding,
        layers={layer: layers[layer] for layer in sorted(layers)},
        norm=ends.norm,
        output=ends.output,
        rotary=fresh.rotary,
        fused_attention=all(part.fused_attention for part in (kept, fresh) if part.layers),
        bytes_read=fresh.bytes_read,
    )


def _tensor(source: ModelSource, stored: StoredTensor) -> torch.Tensor:
    return map_tensor(stored) if source.seed is None else draw_tensor(stored, source.seed)


def _read_config(source: ModelSource) -> Any:
    if source.seed is not None:
        return transformers.CONFIG_MAPPING[source.spec.family].from_dict(dict(source.config))
    return transformers.AutoConfig.from_pretrained(
        str(source.path), local_files_only=True, trust_remote_code=False
    )


def _config(source: ModelSource, part: _Part) -> Any:
    try:
        with LIBRARY:
            config = _read_config(source)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise ModelError(f"{source.name}: config.json is not accepted: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{source.name}: model type {source.spec.family!r} has no decoder in transformers")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _UNSTEADY_ROPE:
        raise ModelError(f"{source.name}: rope type {rope['rope_type']!r} is not supported")
    if not part.output:
        # the library would look for an lm_head to tie
        config.tie_word_embeddings = False
    return config


def _build(source: ModelSource, part: _Part, config: Any, state: dict[str, torch.Tensor]) -> nn.Module:
    whole = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    keep_embedding = part.embed or (part.output and source.spec.tied_embeddings)

    class OwnedPart(whole):  # type: ignore[misc, valid-type]
        """The model's own class without what this stage does not own: those modules never get memory."""

        _keys_to_ignore_on_load_unexpected = [".*"]  # noqa: RUF012 - the library's own form

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in range(len(self.model.layers)):
                if layer not in part.layers:
                    self.model.layers[layer] = nn.Identity()
            if not keep_embedding:
                self.model.embed_tokens = nn.Identity()
            if not part.output:
                self.model.norm, self.lm_head = nn.Identity(), nn.Identity()

    with _library_to_ourselves():
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
def _library_to_ourselves() -> Iterator[None]:
    """One load at a time, and no output from it."""
    with LIBRARY, _silence():
        yield


@contextmanager
def _silence() -> Iterator[None]:
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()  # type: ignore[no-untyped-call]
    log.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()  # type: ignore[no-untyped-call]


def _take_modules(
    model: Any, stored_dtype: torch.dtype | None, *, embed: bool, bytes_read: int, packed: bool
) -> LoadedModules:
    """Take the owned modules out of the model, packing and freeing them one by one."""
    decoder, output = model.model, model.lm_head
    layers = {i: layer for i, layer in enumerate(decoder.layers) if not isinstance(layer, nn.Identity)}
    fused = [make_layer_exact(layer) for layer in layers.values()] if packed else []
    embedding: Any = getattr(decoder.embed_tokens, "weight", None)
    norm, rotary = decoder.norm, decoder.rotary_emb
    if isinstance(output, nn.Identity):
        norm = output = None
    elif packed:
        tied = embedding is output.weight
        norm, output = make_output_exact(norm, output)
        if tied and embed and stored_dtype is not None:
            # A packed matrix cannot be looked up by row, so here the embedding lies beside it: in the dtype
            # of the file, which for most is half of float32.
            embedding = embedding.to(stored_dtype)
    modules = LoadedModules(
        embedding=_lookup(embedding) if embed else None,
        layers=layers,
        norm=norm,
        output=output,
        rotary=rotary,
        fused_attention=bool(fused) and all(fused),
        bytes_read=bytes_read,
    )
    _own_memory(modules)
    return modules


def _lookup(weight: torch.Tensor) -> nn.Embedding:
    module: nn.Embedding = nn.Embedding.from_pretrained(weight.detach())  # type: ignore[no-untyped-call]
    return module


def _own_memory(modules: LoadedModules) -> None:
    """Copy what still points into the mapped file: a file that changes must not change a running model."""
    copies: dict[int, torch.Tensor] = {}  # by address, so that a tied matrix stays one
    for part in modules.parts():
        for parameter in part.parameters():
            parameter.requires_grad_(False)
            address = parameter.data_ptr()
            if address not in copies:
                copies[address] = parameter.data.clone()
            parameter.data = copies[address]
