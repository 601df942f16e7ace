"""The kernels as a plan knows them: the form of a stage's weights and K/V under each.

A form's word is the kernel's, or a dtype's if everything is simply held in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoy.errors import ModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KernelForm:
    """Describe the form of weights and K/V.

    ``dtype`` is that of K/V, and of all weights outside linears or not rounded. ``packed`` linears are laid
    out for the kernel, and cannot be looked up by row. ``bits`` counts those of a rounded weight; it is 0
    without rounding. With rounding there is a scale of ``scale_bytes`` for each ``group`` of weights that are
    multiplied into one output, or for all of them if ``group`` is 0. If a matrix's outputs are no multiple of
    ``outputs``, or its inputs none of ``group``, it is rounded as ``otherwise`` says, and so is `lm_head`.
    """

    dtype: str
    packed: bool = False
    bits: int = 0
    group: int = 0
    scale_bytes: int = 4
    outputs: int = 1
    # The word of another form.
    otherwise: str = ""

    def linear_bytes(self, outputs: int, inputs: int, *, head: bool = False) -> int:
        """Return the bytes of a matrix of [outputs, inputs], without a bias; ``head`` marks `lm_head`."""
        if not self.bits:
            return outputs * inputs * DTYPE_BYTES[self.dtype]
        if self.otherwise and (head or outputs % self.outputs or inputs % self.group):
            return form_of(self.otherwise).linear_bytes(outputs, inputs)
        groups = -(-inputs // self.group) if self.group else 1
        return outputs * (-(-inputs * self.bits // 8) + groups * self.scale_bytes)


FORMS: dict[str, KernelForm] = {
    **{dtype: KernelForm(dtype) for dtype in DTYPE_BYTES},
    "exact-f32": KernelForm("float32", packed=True),
    "plain-f32": KernelForm("float32"),
    "w8a8": KernelForm("float32", packed=True, bits=8),
    # As `model.layers.int4` does it: a scale and a middle in bfloat16
    "w4a16": KernelForm(
        "float32", packed=True, bits=4, group=32, scale_bytes=4, outputs=16, otherwise="w8a8"
    ),
    "cuda-bf16": KernelForm("bfloat16"),
    "cuda-int8": KernelForm("bfloat16", packed=True, bits=8),
    # As `model.backends.cuda.kernels.rounded` does it: a scale and a least value in bfloat16
    "cuda-int4": KernelForm("bfloat16", packed=True, bits=4, group=64, scale_bytes=4, otherwise="cuda-int8"),
}


# Kinds of ``--quantize``: the kernel on a host, and on CUDA.
QUANTIZED = {"int8": ("w8a8", "cuda-int8"), "int4": ("w4a16", "cuda-int4")}

# Kernels under which a row's bits depend on its own sequence alone, and so on no cut between layers.
STEADY = frozenset({"exact-f32", "w8a8", "w4a16"})


def on_device(kernel: str) -> bool:
    """Return whether stages run the kernel on CUDA."""
    return kernel.startswith("cuda-")


def form_of(word: str) -> KernelForm:
    """Return the form of a word. Raises ModelError for a kernel or dtype that no stage holds weights in."""
    if word not in FORMS:
        raise ModelError(f"{word!r} is no dtype and no kernel, expected one of {', '.join(sorted(FORMS))}")
    return FORMS[word]
