"""Give the tensors of a GGUF file the library's names, and describe how they make the library's tensors.

The file's own header is not needed for the layout: config.json has the architecture, and a tensor has its
type as its dtype. So a member that receives tensors describes them as the member with the file does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.arrange import Heads, arranged, plain
from convoy.model.checkpoints.formats.gguf.rows import gguf_rows
from convoy.model.checkpoints.formats.unpacking import StoredLayout, Unpacking, part_of
from convoy.plan.spec.family import Family, GgufForm
from convoy.plan.spec.quantization import Quantization
from convoy.plan.spec.registry import FAMILIES

_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Factors of frequencies, which the settings hold.
FACTORS = {
    "rope_freqs.weight": "rope_freqs",
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
PLAIN = frozenset({"F32", "F16", "BF16"})
_LAYER = re.compile(r"blk\.([0-9]{1,6})\.([a-z0-9_.]+)", re.ASCII)
_IN_LAYER = re.compile(r"model\.layers\.[0-9]{1,6}\.(.+)", re.ASCII)

# Architectures of models that Convoy runs from other files, or that look like them, and the reasons.
_REFUSED = {
    "gemma3n": "several hidden states go from layer to layer",
    "qwen3next": "its layers keep recurrent state in another form",
    "llama4": "its layers look back on chunks, not on windows",
}


@dataclass(frozen=True)
class GgufFamily:
    """Hold a family and its form, which is set."""

    family: Family
    form: GgufForm


def find_family(path: Path, architecture: object, *, has_experts: bool) -> GgufFamily:
    """Return the family of an architecture. Raises ModelError, with the known ones, for another."""
    known = [GgufFamily(one, one.gguf) for one in FAMILIES.values() if one.gguf is not None]
    rows = [row for row in known if row.form.architecture == architecture]
    if len(rows) > 1:
        rows = [row for row in rows if row.form.experts == has_experts]
    if not rows:
        why = _REFUSED.get(str(architecture), "")
        raise ModelError(
            f"{path}: a GGUF file of the architecture {architecture!r} is not read"
            + (f": {why}" if why else ""),
            hint=f"known: {', '.join(sorted({row.form.architecture for row in known}))}; or use the model's "
            "safetensors",
        )
    return rows[0]


def renamed(
    stored: Iterable[StoredTensor], form: GgufForm, config: Mapping[str, object]
) -> Iterator[StoredTensor]:
    """Yield the tensors under the library's names.

    Where several make one, or its values change their places, a tensor has its own name behind the layer's
    prefix. Tensors of layers that predict further tokens are left out. Raises ModelError for an unknown
    tensor.
    """
    names, ends = _names(form), {**_ENDS, **form.ends}
    first, num = (config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    beside = range(first, first + num) if isinstance(first, int) and isinstance(num, int) else range(0)
    for tensor in stored:
        match = _LAYER.fullmatch(tensor.name)
        if tensor.name in FACTORS or (match is not None and int(match[1]) in beside):
            continue
        name = ends.get(tensor.name)
        if match is not None and match[2] in names:
            name = f"model.layers.{match[1]}.{names[match[2]]}"
        if name is None:
            raise ModelError(
                f"{tensor.path}: {tensor.name} is not a tensor that Convoy knows in {form.architecture}"
            )
        yield replace(tensor, name=name)


def _names(form: GgufForm) -> dict[str, str]:
    """Return the names of a layer's tensors behind the prefix: the file's name -> the library's."""
    found: dict[str, str] = {}
    for module, known in _modules(form).items():
        found |= {f"{module}.{kind}": f"{known}.{kind}" for kind in ("weight", "bias")}
    for target, made in form.made.items():
        single = made.arrangement == "as stored"
        found |= {name: target if single else name for name in made.stored}
    return found


def _modules(form: GgufForm) -> dict[str, str]:
    return {module: known for module, known in {**_MODULES, **form.modules}.items() if known}


def describe_gguf(
    quantization: Quantization, config: Mapping[str, object], tensors: Mapping[str, StoredTensor]
) -> StoredLayout:
    """Describe tensors with the library's names. Raises ModelError naming those that do not fit together."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.gguf is None:
        raise quantization.wrong("quant_method", "another: GGUF files of this family are not read")
    made = {whole.name: whole for whole in _arranged(family.gguf, config, tensors)}
    used = {part.name for whole in made.values() for part in whole.parts.values()}
    turned = _turned(family.gguf, config)
    for name, stored in tensors.items():
        heads = turned.get(_behind_layer(name))
        if name not in used and (heads is not None or stored.dtype not in PLAIN):
            made[name] = gguf_rows(stored, heads)
    return StoredLayout(made)


def _arranged(
    form: GgufForm, config: Mapping[str, object], tensors: Mapping[str, StoredTensor]
) -> Iterator[Unpacking]:
    """Yield the tensors that need more than a new name."""
    heads = Heads.read(config)
    # By the first stored tensor of each.
    first = {made.stored[0]: (target, made) for target, made in form.made.items()}
    others = {name for made in form.made.values() for name in made.stored[1:]}
    norms = _norms(form)
    for name, stored in tensors.items():
        own = _behind_layer(name)
        prefix = name.removesuffix(own)
        if own in norms:
            yield arranged(name, "less one", [_whole(stored)], None)
        elif own in others:
            made = next(one for one in form.made.values() if own in one.stored)
            part_of(tensors, prefix + made.stored[0], name)
        elif own in first and first[own][1].arrangement != "as stored":
            target, made = first[own]
            parts = [part_of(tensors, prefix + part, name) for part in made.stored]
            yield arranged(prefix + target, made.arrangement, [_whole(part) for part in parts], heads)


def _whole(stored: StoredTensor) -> Unpacking:
    """Describe a stored tensor by itself: plain, or rows of blocks. Matrices of two bytes can be kept."""
    is_kept = stored.dtype != "F32" and len(stored.shape) in (2, 3)
    return gguf_rows(stored) if is_kept or stored.dtype not in PLAIN else plain(stored)


def _behind_layer(name: str) -> str:
    match = _IN_LAYER.fullmatch(name)
    return match[1] if match else name


def _norms(form: GgufForm) -> frozenset[str]:
    """Return the names of norms that hold one plus the weight, behind the layer's prefix."""
    if not form.norms_plus_one:
        return frozenset()
    modules = _modules(form).items()
    found = {
        known for module, known in modules if module.endswith("_norm") and module not in form.plain_norms
    }
    return frozenset({"model.norm.weight", *(f"{known}.weight" for known in found)})


def _turned(form: GgufForm, config: Mapping[str, object]) -> dict[str, int]:
    """Return the numbers of heads whose rows have another order, by the name behind the layer's prefix."""
    modules = _modules(form)
    found: dict[str, int] = {}
    for module, key in form.turned.items():
        heads = config.get(key)
        if isinstance(heads, int):
            found |= {f"{modules[module]}.{kind}": heads for kind in ("weight", "bias")}
    return found
