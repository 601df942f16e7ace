"""Describe, by quantisation method, which stored tensors of a checkpoint make which tensors of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.bitsandbytes import describe_bitsandbytes
from convoy.model.checkpoints.formats.columns import describe_awq, describe_gptq
from convoy.model.checkpoints.formats.compressed import describe_compressed
from convoy.model.checkpoints.formats.fp8 import describe_fp8
from convoy.model.checkpoints.formats.gguf.names import describe_gguf
from convoy.model.checkpoints.formats.mlx import describe_mlx
from convoy.model.checkpoints.formats.mxfp4 import describe_mxfp4
from convoy.model.checkpoints.formats.nvfp4 import describe_modelopt
from convoy.model.checkpoints.formats.unpacking import StoredLayout
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.quantization import GGUF, MLX, Quantization, read_quantization

_DESCRIBE: dict[str, Callable[[Quantization, Mapping[str, StoredTensor]], StoredLayout]] = {
    MLX: describe_mlx,
    "mxfp4": describe_mxfp4,
    "fp8": describe_fp8,
    "fbgemm_fp8": describe_fp8,
    "compressed-tensors": describe_compressed,
    "gptq": describe_gptq,
    "awq": describe_awq,
    "modelopt": describe_modelopt,
    "bitsandbytes": describe_bitsandbytes,
}


def describe_stored(
    config: Mapping[str, object], tensors: Mapping[str, StoredTensor], model: str
) -> StoredLayout:
    """Describe the layout from the headers alone. Raises ModelError, by file and tensor, where it does not
    fit.
    """
    quantization = read_quantization(ConfigReader(config, model))
    if quantization is None:
        return StoredLayout()
    if quantization.method == GGUF:
        return describe_gguf(quantization, config, tensors)
    return _DESCRIBE[quantization.method](quantization, tensors)
