"""The quantisation of a checkpoint's weights, as its `config.json` gives it: the method and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convoy.errors import ModelError
from convoy.plan.spec.config import ConfigReader

# The methods that `checkpoints.formats` unpacks, by their names in config.json; MLX has no name of its own.
MLX = "mlx"
# Written by `formats.gguf` into the config.json that it makes of a file's settings.
GGUF = "gguf"
METHODS: dict[str, str] = {
    MLX: "MLX affine, 2 to 8 bits, and its small floats",
    "mxfp4": "4-bit floats with a power of two for each block (GPT-OSS)",
    "fp8": "8-bit floats with a scale for each square, row or matrix",
    "fbgemm_fp8": "8-bit floats with a scale for each row",
    "compressed-tensors": "what llm-compressor writes",
    "gptq": "GPTQ",
    "awq": "AWQ, packed for gemm",
    "modelopt": "NVFP4 and FP8, as ModelOpt writes them",
    "bitsandbytes": "nf4",
    GGUF: "llama.cpp's types",
}
QUANTIZATION_KEYS = ("quantization_config", "quantization", "compression_config")


@dataclass(frozen=True)
class Quantization:
    """Hold a method and its ``settings``, which are only checked to be an object; `reader` reads them."""

    # A key of METHODS.
    method: str
    # Of config.json.
    key: str
    settings: Mapping[str, object]
    model: str

    @property
    def reader(self) -> ConfigReader:
        """Return a reader with errors that name the model, the setting and its value."""
        return ConfigReader(self.settings, self.model)

    def wrong(self, setting: str, expected: str) -> ModelError:
        """Return the error for an unsupported or impossible setting, for the caller to raise."""
        return self.reader.wrong(f"{self.key}.{setting}", self.settings.get(setting), expected)


def read_quantization(reader: ConfigReader) -> Quantization | None:
    """Return the quantisation, or None without one.

    Raises ModelError naming an unknown method and the known ones.
    """
    key = next((key for key in QUANTIZATION_KEYS if reader.get(key) is not None), None)
    if key is None:
        return None
    settings = reader.get(key)
    if not isinstance(settings, Mapping):
        raise reader.wrong(key, settings, "an object")
    method = settings.get("quant_method")
    if method is None and "bits" in settings and "group_size" in settings:
        # `mlx_lm.convert` writes these two keys and no method.
        method = MLX
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"{reader.model}: config.json says {key}.quant_method = {method!r}, which is not known here",
            hint=f"known: {', '.join(METHODS)}; or use the model's float32, bfloat16 or float16 weights",
        )
    return Quantization(method, key, settings, reader.model)
