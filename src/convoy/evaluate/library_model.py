"""Load and run the whole model as `transformers` does, as the reference for the results of our stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from convoy.errors import ModelError
from convoy.model.checkpoints.names import decoder_name
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.stored.weights import dense_of
from convoy.model.library import FAILURES, LIBRARY, quiet, reason
from convoy.model.quantize.load import LoadRounding
from convoy.plan.spec.registry import FAMILIES

LIBRARY_DTYPE = torch.float32


def library_version() -> str:
    """Return the library's name and version, like ``transformers 5.23.0``."""
    import transformers

    return f"transformers {transformers.__version__}"


@torch.inference_mode()
def library_logits(
    source: ModelSource,
    texts: Sequence[Sequence[int]],
    on_text: Callable[[int], None] = lambda _: None,
    dtype: torch.dtype = LIBRARY_DTYPE,
    rounding: LoadRounding | None = None,
) -> list[torch.Tensor]:
    """Return logits [T, vocabulary] of each text in ``dtype``. Each text runs alone, whole, without a cache.

    The model runs the library's own modules and eager attention; in float64 its norms and rotations stay
    float32. The model is in memory once, while this runs. Quantised weights are unpacked here, not by the
    library, which for most formats needs a GPU and a third-party package. Tests compare the unpacked weights
    with the formats' own descriptions and tools. ``rounding`` rounds weights first, as
    ``--quantize`` does. Raises ModelError if the library cannot load the model.
    """
    model = _load(source, dtype, rounding)
    found = []
    for index, text in enumerate(texts):
        on_text(index)
        with quiet():
            logits: torch.Tensor = model(torch.tensor([list(text)]), use_cache=False).logits[0]
        found.append(logits.to(dtype).clone())
    return found


def _load(source: ModelSource, dtype: torch.dtype, rounding: LoadRounding | None) -> Any:
    with LIBRARY:
        import transformers

        options: dict[str, Any] = {
            "dtype": dtype,
            "attn_implementation": "eager",
            "local_files_only": True,
        }
        if dtype == torch.float64:
            # The library's own choice, grouped products, has no float64.
            options["experts_implementation"] = "eager"
        try:
            with quiet():
                if source.seed is not None or source.layout.made or source.is_one_file or rounding:
                    return _from_ours(source, options, rounding)
                model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    str(source.path), trust_remote_code=False, **options
                )
        except FAILURES as error:
            raise ModelError(f"{source.name}: transformers cannot load it: {reason(error)}") from error
        return model.to(dtype).eval()


def _from_ours(source: ModelSource, options: dict[str, Any], rounding: LoadRounding | None) -> Any:
    """Return the library's model with tensors that we draw, unpack or round."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if source.seed is None and not source.is_one_file:
        config = transformers.AutoConfig.from_pretrained(
            str(source.path), local_files_only=True, trust_remote_code=False
        ).get_text_config()
    else:
        config = transformers.CONFIG_MAPPING[source.spec.family].from_dict(dict(source.config))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    names = source.layout.shapes(source.tensors)
    turned = FAMILIES[source.spec.family].transposed_experts
    state = {}
    for name in names:
        rounded = None if rounding is None else rounding.read(name)
        plain = read_tensor(source, name) if rounded is None else dense_of(rounded, turned=turned)
        state[decoder_name(name)] = plain
    whole: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return whole.from_pretrained(None, config=config, state_dict=state, **options).to(options["dtype"]).eval()
