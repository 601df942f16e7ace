"""Write a synthetic model in each form in which files hold weights; `FORMS` has one row for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from convoy.bench.forms.blocks import write_blocks
from convoy.bench.forms.codes import AWQ, FP8, GPTQ, MLX_MXFP4, CodeLayout, mlx, write_codes
from convoy.errors import ModelError
from convoy.model.checkpoints.source import ModelSource

# The types that llama.cpp's own quantiser gives to the output under most types of the other matrices.
_OUTPUT = {"Q4_0": "Q6_K", "MXFP4": "Q8_0"}


def write_form(source: ModelSource, form: str, folder: Path) -> Path:
    """Write ``source``, a synthetic model, in a form of `FORMS` into an empty folder, with a tokeniser.

    Returns the path that `ModelSource.resolve` takes. Raises ModelError for a model or a form that does not
    fit, and for a disk that refuses.
    """
    # Imported late: transformers takes seconds to import.
    from convoy.model.text.byte_tokenizer import byte_tokenizer

    if source.seed is None:
        raise ModelError(f"{source.name} is no synthetic model, and only these are written in other forms")
    try:
        byte_tokenizer(source.spec.vocab_size).save_pretrained(folder)
        return FORMS[form](source, folder)
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {(error.strerror or 'unwritable').lower()}") from error


def stored_bytes(path: Path) -> int:
    """Return the bytes of all tensors of a model."""
    return sum(tensor.num_bytes for tensor in ModelSource.resolve(str(path)).tensors.values())


def _gguf(choose: Callable[[str, int], str]) -> Callable[[ModelSource, Path], Path]:
    def write(source: ModelSource, folder: Path) -> Path:
        path = folder / "model.gguf"
        write_blocks(source, path, choose)
        return path

    return write


def _mostly(kind: str) -> Callable[[ModelSource, Path], Path]:
    """Write matrices of one type, and the output as llama.cpp does beside it."""
    return _gguf(lambda name, _: _OUTPUT.get(kind, kind) if name == "output.weight" else kind)


def _q4_k_m(name: str, num_layers: int) -> str:
    """Choose as llama.cpp's quantiser does: Q6_K for the output, and in half of the layers for more."""
    if name == "output.weight":
        return "Q6_K"
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return "Q4_K"
    layer, eighth = int(name.split(".")[1]), num_layers // 8
    has_more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if has_more else "Q4_K"


def _coded(layout: CodeLayout) -> Callable[[ModelSource, Path], Path]:
    def write(source: ModelSource, folder: Path) -> Path:
        write_codes(source, folder, layout)
        return folder

    return write


FORMS: Mapping[str, Callable[[ModelSource, Path], Path]] = {
    **{kind: _mostly(kind) for kind in ("F32", "BF16", "Q8_0", "Q4_0")},
    "Q4_K_M": _gguf(_q4_k_m),
    "MXFP4": _mostly("MXFP4"),
    "mlx-8": _coded(mlx(8)),
    "mlx-4": _coded(mlx(4)),
    "mlx-mxfp4": _coded(MLX_MXFP4),
    "gptq-4": _coded(GPTQ),
    "awq-4": _coded(AWQ),
    "fp8": _coded(FP8),
}
# Those in files of llama.cpp, which other programs read as well.
GGUF_FORMS = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "MXFP4")
