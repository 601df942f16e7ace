"""How a checkpoint's weights are quantised, as its `config.json` says: the word for it, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convoy.errors import ModelError
from convoy.plan.spec.config import ConfigReader

# What `model.formats` unpacks, by what config.json calls it; MLX has no word of its own
MLX = "mlx"
METHODS: dict[str, str] = {
    MLX: "MLX affine, 2 to 8 bits",
    "mxfp4": "4-bit floats with a power of two for each block (GPT-OSS)",
    "fp8": "8-bit floats with a scale for each square, row or matrix",
    "fbgemm_fp8": "8-bit floats with a scale for each row",
    "compressed-tensors": "what llm-compressor writes",
    "gptq": "GPTQ",
    "awq": "AWQ, packed for gemm",
}
_KEYS = ("quantization_config", "quantization", "compression_config")


@dataclass(frozen=True)
class Quantization:
    """``settings`` are unchecked but for being an object; `reader` reads them."""

    method: str  # a key of METHODS
    key: str  # of config.json
    settings: Mapping[str, object]
    model: str

    @property
    def reader(self) -> ConfigReader:
        """Errors name the model, the setting and its value."""
        return ConfigReader(self.settings, self.model)

    def wrong(self, setting: str, expected: str) -> ModelError:
        """The error for a setting that is not supported or cannot be true, for the caller to raise."""
        return self.reader.wrong(f"{self.key}.{setting}", self.settings.get(setting), expected)


def read_quantization(reader: ConfigReader) -> Quantization | None:
    """None where weights are not quantised. ModelError names an unknown method and those that are known."""
    key = next((key for key in _KEYS if reader.get(key) is not None), None)
    if key is None:
        return None
    settings = reader.get(key)
    if not isinstance(settings, Mapping):
        raise reader.wrong(key, settings, "an object")
    method = settings.get("quant_method")
    if method is None and "bits" in settings and "group_size" in settings:
        method = MLX  # `mlx_lm.convert` writes these two and no word
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"{reader.model}: config.json says {key}.quant_method = {method!r}, which is not known here",
            hint=f"known: {', '.join(METHODS)}; or use the model's float32, bfloat16 or float16 weights",
        )
    return Quantization(method, key, settings, reader.model)
