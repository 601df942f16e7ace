"""Build the model's own class from `transformers`, from an untrusted config.json.

The library checks little of its input: an unforeseen value ends in any Python exception. All of these are the
model's fault, and become a ModelError that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from convoy.errors import ModelError
from convoy.model.checkpoints.names import decoder_name
from convoy.model.checkpoints.owned import LAYER_INPUT_NAMES
from convoy.model.checkpoints.slices import narrow_config
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.stage_tensors import TensorPart
from convoy.model.kernels.stored.weights import Stored
from convoy.model.layers.attention import ATTENTION_NAME, packed_attention
from convoy.model.library import FAILURES, FOREIGN, LIBRARY, quiet, reason
from convoy.model.loading.library_config import text_config
from convoy.model.loading.withheld import Withheld
from convoy.model.parallel.experts import keep_own_experts
from convoy.plan.spec.sharding import Shard

# tensors by their names in the model; stored matrices are withheld from the library
_State = dict[str, Stored]
_AS_READ: dict[str, Any] = {
    "dtype": torch.float32,
    "attn_implementation": ATTENTION_NAME,
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
    "local_files_only": True,
}
AttentionInterface.register(ATTENTION_NAME, packed_attention)


def decoder_config(source: ModelSource, part: TensorPart, shard: Shard) -> Any:
    """Return the library's configuration of a rank's slice of ``part``. Raises ModelError if invalid."""
    config = text_config(source)
    if hasattr(config, "quantization_config"):
        # the tensors are unpacked when they are read
        del config.quantization_config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{source.name}: model type {source.spec.family!r} has no decoder in transformers")
    _check_padding(source, config)
    if shard.world_size > 1:
        narrow_config(config, source.spec, shard)
    if not part.output:
        # otherwise the library looks for an lm_head to tie, and this stage has none
        config.tie_word_embeddings = False
    return config


def _check_padding(source: ModelSource, config: Any) -> None:
    """Refuse a padding id outside the vocabulary.

    Most families' embeddings mark this row. Convoy never looks it up, but the library needs it to exist.
    """
    padding, rows = getattr(config, "pad_token_id", None), source.spec.vocab_size
    if isinstance(padding, int) and not -rows <= padding < rows:
        raise ModelError(
            f"{source.name}: config.json says pad_token_id = {padding}, expected one of {rows} tokens",
            hint="set it to null, or to a token of the vocabulary",
        )


def build_decoder(
    source: ModelSource, part: TensorPart, config: Any, state: _State, shard: Shard, *, withheld: Withheld
) -> nn.Module:
    """Build the model of ``config`` from the tensors of ``state``, limited to ``part``.

    Tensors that are ``withheld`` keep the form in which they are stored. Raises ModelError for tensors that
    are missing, misshapen or surplus, and for a configuration that the library cannot build a model of.
    """
    model = _build(source, part, config, state, shard, withheld=withheld)
    withheld.give_back(model)
    _check_biases(source, model, state)
    return model


def _build(
    source: ModelSource, part: TensorPart, config: Any, state: _State, shard: Shard, *, withheld: Withheld
) -> nn.Module:
    looks_up = source.spec.layer_input_size > 0 and bool(part.layers)
    keep_embedding = part.embed or looks_up or (part.output and source.spec.tied_embeddings)

    def leave_out(model: Any) -> None:
        for layer in range(len(model.model.layers)):
            if layer not in part.layers:
                model.model.layers[layer] = nn.Identity()
        keep_own_experts(model, shard)
        for name in LAYER_INPUT_NAMES:
            if hasattr(model, "model") and hasattr(model.model, name.removeprefix("model.")):
                model.set_submodule(name, nn.Identity())
        if not keep_embedding:
            model.model.embed_tokens = nn.Identity()
        if not part.output:
            model.model.norm, model.model.hc_head, model.lm_head = (nn.Identity() for _ in range(3))
        withheld.take(model)

    owned_part = _owned_part(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    with LIBRARY, quiet():
        try:
            model, report = owned_part.from_pretrained(
                None, leave_out, config=config, state_dict=state, **_AS_READ
            )
        except FAILURES as error:
            why = f"{source.name} cannot be built from its config.json: {reason(error)}"
            raise ModelError(why, hint=FOREIGN) from error
    _check_report(source, report)
    return model.eval()  # type: ignore[no-any-return]


# Kept, as the library reads the annotations of a class anew for each one derived from it.
@functools.cache
def _owned_part(model_class: Any) -> Any:
    """Return a class derived from a model's own, without the modules that a stage does not own."""

    class OwnedPart(model_class):  # type: ignore[misc]
        """Omit from the model the modules that ``leave_out`` replaces: they never get memory."""

        _keys_to_ignore_on_load_unexpected = [".*"]  # noqa: RUF012 - the library's own form

        def __init__(self, config: Any, leave_out: Callable[[Any], None]) -> None:
            super().__init__(config)
            leave_out(self)

        @classmethod
        def can_generate(cls) -> bool:
            """Keep the library from making settings of its sampling at each load."""
            return False

    return OwnedPart


def _check_report(source: ModelSource, report: dict[str, Any]) -> None:
    for name, found, expected in sorted(report["mismatched_keys"]):
        stored = next((t for t in source.tensors.values() if decoder_name(t.name) == name), None)
        place = source.name if stored is None else stored.path
        raise ModelError(f"{place}: {name} has shape {list(found)}, expected {list(expected)}")
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{source.path}: the checkpoint has no tensor {missing[0]}{more}",
            hint="a shard is missing or the directory is of another model",
        )


def _check_biases(source: ModelSource, model: nn.Module, state: Mapping[str, Stored]) -> None:
    """Refuse a bias that config.json denies: without it the model would run and give other results."""
    for name, tensor in state.items():
        module = name.removesuffix(".bias")
        # tools that write GPTQ store zero biases for linears without one
        if module == name or not isinstance(tensor, torch.Tensor) or not tensor.any():
            continue
        try:
            linear = model.get_submodule(module)
        except AttributeError:
            # the tensor does not belong to the decoder
            continue
        if isinstance(linear, nn.Linear) and linear.bias is None:
            stored = next((t for t in source.tensors.values() if decoder_name(t.name) == name), None)
            raise ModelError(
                f"{source.name if stored is None else stored.path}: {name} is a bias, but "
                f"config.json says that {module} has none",
                hint=FOREIGN,
            )
