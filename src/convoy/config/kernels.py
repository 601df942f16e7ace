"""The kernels: one row for each, with its name, the form of weights, the dtypes of K/V, and error bounds.

A form's word is the kernel's, or a dtype's if everything is simply held in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, get_args

from convoy.errors import ModelError, UsageError

# Outputs that lie together in the memory of a compiled kernel.
_PANEL = 64
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KernelForm:
    """Describe the form of weights.

    ``dtype`` is that of all weights outside linears or not rounded. ``packed`` linears are laid
    out for the kernel, and cannot be looked up by row. ``bits`` counts those of a rounded weight; it is 0
    without rounding. With rounding there is a scale of ``scale_bytes`` for each ``group`` of weights that are
    multiplied into one output, or for all of them if ``group`` is 0. If a matrix's outputs are no multiple of
    ``outputs``, or its inputs none of ``group`` (of ``outputs`` if that is 0), it is held as ``otherwise``
    says, and so is `lm_head`.
    Where it ``keeps`` the file's form, a linear takes the bytes of its file. With both, a matrix is rounded
    if its inputs fill groups, and kept if they do not.
    """

    dtype: str
    packed: bool = False
    bits: int = 0
    group: int = 0
    scale_bytes: int = 4
    outputs: int = 1
    # The word of another form.
    otherwise: str = ""
    keeps: bool = False
    # Whether codes are floats of 8 bits (E4M3), and rows are rounded to such floats too.
    floats: bool = False
    # Whether a CUDA device keeps the codes and scales of linears whose form is in `CARD_FORMS`.
    keeps_on_card: bool = False

    def linear_bytes(
        self, outputs: int, inputs: int, *, head: bool = False, kept_bytes: int = 0, card_bytes: int = 0
    ) -> int:
        """Return the bytes of a matrix of [outputs, inputs], without a bias.

        ``head`` marks `lm_head`. ``kept_bytes`` are those of a form of the file that stays as it is, and
        ``card_bytes`` those of its codes and scales on a CUDA device; 0 for none.
        """
        if self.keeps_on_card and card_bytes:
            return card_bytes
        is_rounded = self.bits and not (self.keeps and inputs % self.group)
        # Outputs lie in panels.
        in_panels = -(-outputs // _PANEL) * _PANEL
        if self.keeps and kept_bytes and not is_rounded:
            return kept_bytes * in_panels // outputs
        if not is_rounded:
            return outputs * inputs * DTYPE_BYTES[self.dtype]
        if self.otherwise and (head or outputs % self.outputs or inputs % (self.group or self.outputs)):
            return form_of(self.otherwise).linear_bytes(outputs, inputs)
        groups = -(-inputs // self.group) if self.group else 1
        of_output = -(-inputs * self.bits // 8) + groups * self.scale_bytes
        return (in_panels if self.keeps else outputs) * of_output


@dataclass(frozen=True)
class KvForm:
    """Describe a dtype of K/V.

    ``num_values`` neighbouring values of a head take ``bytes_each`` together; they share a scale if they are
    several.
    """

    name: str
    bytes_each: int
    num_values: int = 1
    # Added to `ErrorBounds.library` and to its median, as the library's K/V are float32.
    error: float = 0.0
    median: float = 0.0

    def num_bytes(self, elements: int) -> int:
        """Return the bytes of ``elements``, a multiple of ``num_values``."""
        return elements * self.bytes_each // self.num_values


@dataclass(frozen=True)
class ErrorBounds:
    """Bound the distance of logits from the unsplit stage's, and from the library's whole model.

    The first two bounds are for logits up to 10 and grow in proportion beyond, because float32 rounds in
    proportion. The median distance from the library, over positions, does not grow.
    """

    unsplit: float
    library: float
    median: float

    @staticmethod
    def grown(bound: float, greatest_logit: float) -> float:
        """Return ``bound`` for logits that reach ``greatest_logit``."""
        return bound * max(1.0, greatest_logit / 10)


@dataclass(frozen=True)
class Kernel:
    """Describe a kernel: what a plan, the settings and `convoy verify` know of it."""

    name: str
    form: KernelForm
    bounds: ErrorBounds
    # The dtypes in which its stages can hold K/V, its own first.
    kv_dtypes: tuple[str, ...] = ("f32", "bf16", "f16", "q8")
    # Of models with experts; None: `bounds`.
    expert_bounds: ErrorBounds | None = None
    # The distance from the library with several ranks; None: that of `bounds`.
    ranks_library: float | None = None
    # Whether stages run it on CUDA; the others run on hosts.
    on_cuda: bool = False
    # Whether stages run it on MLX.
    on_mlx: bool = False
    # Whether a row's bits depend on its own sequence alone, and so on no cut between layers.
    steady: bool = False
    # The word of --quantize that asks for it.
    quantize: str = ""
    # The kernel that stages on CUDA run if this one is asked for.
    cuda_name: str = ""
    # The word of --compute. With int8, rows are rounded to 8 bits where a form's products are whole numbers;
    # with fp8, weights and rows are rounded to floats of 8 bits.
    compute: str = "exact"


# Exact mode's layers: linears in the form of their file, and float32 linears packed for oneDNN.
EXACT = "exact-f32"
# The same with linears rounded as they are loaded, as `convoy quantize` rounds them.
EXACT_Q8, EXACT_Q4 = "exact-q8", "exact-q4"
# The library's layers in float32.
PLAIN = "plain-f32"
# The same three with rows rounded to 8 bits, and products of whole numbers.
INT8, INT8_Q8, INT8_Q4 = "int8-stored", "int8-q8", "int8-q4"
# Stages on CUDA: weights and K/V in bfloat16, Convoy's own attention (`model.backends.cuda`).
CUDA_KERNEL = "cuda-bf16"
# The same with linears rounded as they are loaded, as `convoy quantize` rounds them.
CUDA_INT8, CUDA_INT4 = "cuda-int8", "cuda-int4"
# Weights and rows as floats of 8 bits, multiplied by the tensor cores.
CUDA_FP8 = "cuda-fp8"
# Stages on MLX (`model.backends.mlx`): activations and K/V in either dtype, quantised matrices as stored.
MLX_BF16, MLX_F32 = "mlx-bf16", "mlx-f32"
# The setting that lets each member choose a kernel, and leaves K/V in the kernel's own dtype.
AUTO: Final = "auto"
# The words of --quantize, and of the formats of `convoy quantize`.
QuantizeFormat = Literal["q4", "q8"]
# The words of --compute.
RequestedCompute = Literal["exact", "int8", "fp8"]
_CUDA_KV = ("bf16",)
_EXACT_BOUNDS = ErrorBounds(0.0, 2e-5, 2e-5)
# Codes of groups of 32, each with a scale in bfloat16.
_Q8_FORM = KernelForm("float32", packed=True, bits=8, group=32, scale_bytes=2, keeps=True)
_Q4_FORM = replace(_Q8_FORM, bits=4, otherwise=EXACT_Q8)
# Seen: up to 0.23 for each ten units of logit, and a median of 0.29. If a rounded row goes to another expert,
# one position may be far off.
_INT8_BOUNDS, _INT8_EXPERT_BOUNDS = ErrorBounds(0.0, 1.0, 0.5), ErrorBounds(0.0, 5.0, 1.0)

# By name. The form of q8 is that of Q8_0 in GGUF: 32 codes of 8 bits with a float16 scale.
KV_FORMS: dict[str, KvForm] = {
    form.name: form
    for form in (
        KvForm("f32", 4),
        # Seen: up to 0.09, 0.015 and 0.16 for each ten units of logit; medians a third of that, where logits
        # reach 31 up to 0.18 for q8.
        KvForm("bf16", 2, error=0.3, median=0.2),
        KvForm("f16", 2, error=0.05, median=0.03),
        KvForm("q8", 34, num_values=32, error=0.5, median=0.5),
    )
}
# The same in models with experts: a rounded value may route a row to another one.
EXPERT_KV_ERROR, EXPERT_KV_MEDIAN = 5.0, 0.3
# The form of K/V beside weights of a plain dtype.
_KV_OF_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

# By name, best first on a device; rounded ones come last, since the head must request them.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            EXACT,
            KernelForm("float32", packed=True, keeps=True),
            _EXACT_BOUNDS,
            # Ranks add their float32 sums in another order than one process does.
            ranks_library=4e-5,
            steady=True,
        ),
        Kernel(
            PLAIN,
            KernelForm("float32"),
            ErrorBounds(2e-5, 2e-5, 2e-5),
            ranks_library=4e-5,
        ),
        # The library's model is given the rounded weights.
        Kernel(
            EXACT_Q8,
            _Q8_FORM,
            _EXACT_BOUNDS,
            ranks_library=4e-5,
            steady=True,
            quantize="q8",
            cuda_name=CUDA_INT8,
        ),
        Kernel(
            EXACT_Q4,
            _Q4_FORM,
            _EXACT_BOUNDS,
            ranks_library=4e-5,
            steady=True,
            quantize="q4",
            cuda_name=CUDA_INT4,
        ),
        # The library's model is given the rounded weights, and no rounded rows.
        *(
            Kernel(
                name,
                form,
                _INT8_BOUNDS,
                expert_bounds=_INT8_EXPERT_BOUNDS,
                steady=True,
                quantize=quantize,
                compute="int8",
            )
            for name, form, quantize in (
                (INT8, KernelForm("float32", packed=True, keeps=True), ""),
                (INT8_Q8, _Q8_FORM, "q8"),
                (INT8_Q4, _Q4_FORM, "q4"),
            )
        ),
        Kernel(
            CUDA_KERNEL,
            KernelForm("bfloat16", keeps_on_card=True),
            # The step of bfloat16 at 4 is 0.03.
            ErrorBounds(0.3, 0.3, 0.15),
            # If two experts score nearly the same, bfloat16 may choose another one than float32 does. One
            # position is then far from the library's. Seen: 0.06 from the unsplit stage, a median of 0.11.
            expert_bounds=ErrorBounds(0.5, 5.0, 0.3),
            kv_dtypes=_CUDA_KV,
            on_cuda=True,
        ),
        Kernel(
            CUDA_INT8,
            KernelForm("bfloat16", packed=True, bits=8, group=32, scale_bytes=2),
            ErrorBounds(0.3, 2.0, 0.5),
            kv_dtypes=_CUDA_KV,
            on_cuda=True,
        ),
        Kernel(
            CUDA_INT4,
            KernelForm("bfloat16", packed=True, bits=4, group=32, scale_bytes=2, otherwise=CUDA_INT8),
            ErrorBounds(0.3, 20.0, 5.0),
            kv_dtypes=_CUDA_KV,
            on_cuda=True,
        ),
        Kernel(
            CUDA_FP8,
            KernelForm(
                "bfloat16", packed=True, bits=8, group=0, outputs=16, otherwise="bfloat16", floats=True
            ),
            # A lone row is not rounded, and the same row among others is. Seen: 0.35 between the two.
            ErrorBounds(1.0, 2.0, 0.5),
            kv_dtypes=_CUDA_KV,
            on_cuda=True,
            compute="fp8",
        ),
        Kernel(
            MLX_BF16,
            KernelForm("bfloat16", keeps=True),
            # As on CUDA.
            ErrorBounds(0.3, 0.3, 0.15),
            expert_bounds=ErrorBounds(0.5, 5.0, 0.3),
            # Each rank rounds its part of a sum. Seen: 0.32 for each ten units of logit.
            ranks_library=0.6,
            kv_dtypes=("bf16",),
            on_mlx=True,
        ),
        # A matrix of halves is held in float32. The plan counts codes as if they were, too.
        Kernel(
            MLX_F32,
            KernelForm("float32"),
            # MLX's exponentials on a CPU are off by up to 2.7e-6 of their value, torch's by 1.2e-6.
            # Seen: 2.5e-5.
            ErrorBounds(2e-5, 5e-5, 2e-5),
            kv_dtypes=("f32",),
            on_mlx=True,
        ),
    )
}
# The forms of files that kernels with ``keeps`` have compiled code for. The names are those of
# `model.kernels.stored`; behind them stand parts that a matrix may have: "zeros", which are subtracted, and
# "places", the group of each input.
KEPT_FORMS = frozenset(
    (
        *("BF16", "F16", "I8", "I8 zeros", "F8_E4M3", "F8_E5M2", "MXFP4", "NVFP4", "NF4"),
        *(f"affine{bits}" for bits in (2, 3, 4, 5, 6, 8)),
        *(f"centred{bits}{zeros}" for bits in (2, 4, 8) for zeros in ("", " zeros", " zeros places")),
        *(f"gguf:{name}" for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS")),
        *(f"gguf:{name}" for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0")),
        *(f"gguf:{name}" for name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")),
        *(f"gguf:{name}" for name in ("IQ3_XXS", "IQ3_S", "MXFP4", "NVFP4")),
    )
)
# The forms of files that linears keep on a CUDA device: the bits that a weight takes there beyond those of
# its file. Codes take 4 or 8 bits there, and scales whole bytes.
CARD_FORMS: dict[str, float] = {
    **dict.fromkeys(("I8", "F8_E4M3", "affine4", "affine8", "centred4", "centred8"), 0.0),
    **dict.fromkeys(("gguf:Q4_0", "gguf:Q4_1", "gguf:Q8_0"), 0.0),
    "affine2": 2.0,
    "affine3": 1.0,
    "affine5": 3.0,
    "affine6": 2.0,
    "centred2": 2.0,
    "MXFP4": 4.25,
    "NVFP4": 5.5,
    "gguf:Q2_K": 6.5,
    "gguf:Q3_K": 5.125,
    "gguf:Q4_K": 0.125,
    "gguf:Q5_0": 3.0,
    "gguf:Q5_1": 3.0,
    "gguf:Q5_K": 3.125,
    "gguf:Q6_K": 2.0,
    "gguf:IQ4_NL": 4.0,
    "gguf:IQ4_XS": 4.0625,
    "gguf:MXFP4": 4.25,
}
# Inputs of a matrix on a CUDA device come in whole units of codes.
CARD_UNIT = 32
# On a CUDA device, a decode is padded to the next of these numbers of rows, and captured once for each.
CAPTURED_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CUDA_KERNELS = tuple(name for name, kernel in KERNELS.items() if kernel.on_cuda)
MLX_KERNELS = tuple(name for name, kernel in KERNELS.items() if kernel.on_mlx)
HOST_KERNELS = tuple(name for name in KERNELS if name not in CUDA_KERNELS + MLX_KERNELS)
# Kernels of hosts that round rows to 8 bits.
INT8_KERNELS = tuple(name for name in HOST_KERNELS if KERNELS[name].compute == "int8")
# Kernels of exact mode: they multiply by linears in the form of the file, or in that of `convoy quantize`.
EXACT_KERNELS = tuple(name for name in HOST_KERNELS if KERNELS[name].form.keeps and name not in INT8_KERNELS)
STEADY = frozenset(name for name, kernel in KERNELS.items() if kernel.steady)
# The kernel of exact mode for each word of --quantize.
QUANTIZED = {KERNELS[name].quantize: name for name in EXACT_KERNELS if KERNELS[name].quantize}
# The settings of a kernel and of K/V's dtype. Their words are the rows above; a checker sees plain text.
if TYPE_CHECKING:
    RequestedKernel = str
    RequestedKvDtype = str
else:
    RequestedKernel = Literal[(AUTO, *HOST_KERNELS, CUDA_FP8)]
    RequestedKvDtype = Literal[(AUTO, *KV_FORMS)]
# Behind the name of a kernel that keeps the forms of files, where a member has no compiled code for them.
_UNPACKED = " unpacked"
FORMS: dict[str, KernelForm] = {
    **{dtype: KernelForm(dtype) for dtype in DTYPE_BYTES},
    **{name: kernel.form for name, kernel in KERNELS.items()},
    **{
        name + _UNPACKED: KernelForm(kernel.form.dtype, packed=kernel.form.packed)
        for name, kernel in KERNELS.items()
        # Products of whole numbers need the codes.
        if name in EXACT_KERNELS
    },
}


def card_bytes(form: str, elements: int, inputs: int, kept_bytes: int) -> int:
    """Return the bytes of a matrix's codes and scales on a CUDA device, or 0 where it is unpacked there.

    ``form`` is the name of its form in the file, in which it takes ``kept_bytes``; "" for none.
    """
    if form not in CARD_FORMS or inputs % CARD_UNIT:
        return 0
    return kept_bytes + round(elements * CARD_FORMS[form] / 8)


def host_kernels_text() -> str:
    """Return the settings that `choose_kernel` knows, as help and errors list them."""
    *most, last = (AUTO, *HOST_KERNELS)
    return f"{', '.join(most)} or {last}"


def on_device(kernel: str) -> bool:
    """Return whether stages run the kernel on a device: on CUDA or on MLX."""
    return kernel in CUDA_KERNELS + MLX_KERNELS


def form_of(word: str) -> KernelForm:
    """Return the form of a word. Raises ModelError for a kernel or dtype that no stage holds weights in."""
    if word not in FORMS:
        raise ModelError(f"{word!r} is no dtype and no kernel, expected one of {', '.join(sorted(FORMS))}")
    return FORMS[word]


def loaded_bits(kernel: str) -> int:
    """Return the bits to which a kernel of hosts rounds weights as they are loaded, or 0."""
    form = KERNELS[kernel].form
    return form.bits if form.keeps else 0


def measured_form(kernel: str, form: str) -> str:
    """Return the form whose linears are measured for a kernel, of files in ``form``; "" for its own layers.

    Kernels that round weights as they are loaded have a form of their own.
    """
    own = form_of(kernel)
    if kernel in CUDA_KERNELS:
        return "float8" if own.floats else f"rounded{own.bits}" if own.bits else form
    if not own.keeps:
        return ""
    bits = loaded_bits(kernel)
    return f"rounded{bits}" if bits else form


def computing_kernel(
    kernel: str, compute: str, *, kernel_from: str = "[model] kernel", compute_from: str = "[model] compute"
) -> str:
    """Return the kernel that ``compute`` asks for beside ``kernel``, or ``kernel`` where that is "exact".

    Errors name ``kernel_from`` and ``compute_from``, the flags or keys with the two words. Raises UsageError
    for an unknown word, and for a kernel that the word does not go with.
    """
    words = get_args(RequestedCompute)
    if compute not in words:
        expected = f"{', '.join(words[:-1])} or {words[-1]}"
        raise UsageError(
            f"{compute_from} is {compute!r}, expected {expected}", hint=f"give {compute_from} {expected}"
        )
    if compute == "exact" or (compute == "int8" and kernel in INT8_KERNELS):
        return kernel
    if compute == "fp8":
        if kernel not in {AUTO, CUDA_KERNEL, CUDA_FP8}:
            raise UsageError(
                f"{compute_from} is fp8, and {kernel_from} is {kernel}: fp8 rounds the weights of the file",
                hint=f"leave out {kernel_from}, or {compute_from}",
            )
        return CUDA_FP8
    quantize = (
        None
        if kernel not in {AUTO, *EXACT_KERNELS}
        else KERNELS[EXACT if kernel == AUTO else kernel].quantize
    )
    if quantize is None:
        raise UsageError(
            f"{compute_from} is {compute}, and {kernel_from} is {kernel}, which has no 8-bit products",
            hint=f"leave out {kernel_from}, or {compute_from}",
        )
    return next(name for name in INT8_KERNELS if KERNELS[name].quantize == quantize)


def quantized_kernel(kernel: str, quantize: str) -> str:
    """Return the kernel like ``kernel`` that holds weights as the word of --quantize says."""
    host = QUANTIZED[quantize]
    if kernel in CUDA_KERNELS:
        return KERNELS[host].cuda_name
    return computing_kernel(host, "int8") if kernel in INT8_KERNELS else host


def held_form(kernel: str, *, unpacks: bool) -> str:
    """Return the word of the form in which a member holds a kernel's weights.

    A member that ``unpacks`` has no compiled code, and unpacks the forms of files.
    """
    unpacked = kernel + _UNPACKED
    return unpacked if unpacks and unpacked in FORMS else kernel


def kv_form(word: str, asked: str = AUTO) -> KvForm:
    """Return the form of K/V beside weights of a kernel or dtype: ``asked``, or the kernel's own for "auto".

    Raises ModelError for an unknown word, and for a dtype in which stages with this kernel hold no K/V.
    """
    form, kernel = form_of(word), KERNELS.get(word.removesuffix(_UNPACKED))
    known = (_KV_OF_DTYPE[form.dtype],) if kernel is None else kernel.kv_dtypes
    if asked == AUTO:
        return KV_FORMS[known[0]]
    if asked not in KV_FORMS:
        raise ModelError(f"kv_dtype is {asked!r}, expected {', '.join((AUTO, *KV_FORMS))}")
    if asked not in known:
        raise ModelError(
            f"kv_dtype is {asked}, and {word} holds K/V as {' or '.join(known)}",
            hint="leave kv_dtype at auto, or choose one that every member's kernel holds",
        )
    return KV_FORMS[asked]
