"""Define synthetic models: real dimensions, and weights generated from a seed instead of read from files.

A tensor's values depend on its name, its shape and the seed alone, so every member generates the same values
for the tensors that it owns. Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
gives integers that are the same on every machine and in every release of NumPy. One rounding and one
multiplication turn them into floats, and both are reproducible. A normal distribution would need a logarithm,
which is not.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor, file_bytes
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.families.llama import LLAMA
from convoy.plan.spec.heads import read_heads
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.registry import read_family
from convoy.plan.spec.tensors import layer_tensors

if TYPE_CHECKING:
    import torch

PREFIX = "synthetic:"
# one token for each byte, and the four control tokens of `model.text.byte_tokenizer`
MIN_VOCABULARY = 260
_FORM = re.compile(r"synthetic:(?P<of>.+?)(@(?P<seed>[0-9]{1,18}))?", re.ASCII | re.DOTALL)
_MAX_CONFIG_BYTES = 16 << 20
# this name changes whenever the generated values do
_METHOD = "convoy-synthetic-1"
# 64-bit integers generated at once, each of which gives two numbers
_BLOCK = 1 << 20
# spread of biases, and of norms around 1: large enough that a missing one shows in the results
_VARIED = 0.1

CONFIGS: Mapping[str, Mapping[str, object]] = {
    "llama-250m": {
        "model_type": LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        # 8,192 tokens of prompt, and room for an answer
        "max_position_embeddings": 8704,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    # for CUDA: 16 GB in bfloat16, which only a device generates in a reasonable time
    "llama-3-8b": {
        "model_type": LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    # for tests of agents: their first requests have up to 26,000 tokens, and layers this narrow run them
    # in seconds
    "agent": {
        "model_type": LLAMA,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 8192,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
}
# The models that have a tokeniser with a chat template for tools, by the folder of its files. All others read
# and write bytes.
TOKENIZERS: Mapping[str, Path] = {"agent": Path(__file__).resolve().parents[2] / "models" / "agent"}


@dataclass(frozen=True)
class Synthetic:
    """Hold a parsed name of a synthetic model, ``synthetic:NAME`` or ``synthetic:CONFIG.json``, and its seed.

    The seed follows as ``@SEED``; without it the seed is 0.
    """

    of: str
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Synthetic | None:
        """Parse a name; None if it is not a synthetic model's. Raises ModelError if nothing follows the
        colon.
        """
        if not text.startswith(PREFIX):
            return None
        match = _FORM.fullmatch(text)
        if match is None:
            raise ModelError(f"{PREFIX} names no model", hint=_known())
        return cls(match["of"], int(match["seed"] or 0))

    @property
    def has_name(self) -> bool:
        """Tell whether the name is in `CONFIGS`, so that no file is needed."""
        return self.of in CONFIGS

    @property
    def name(self) -> str:
        """Return the name to show and send: a configuration file appears without its folder."""
        return self._spelled(self.of if self.has_name else Path(self.of).name)

    @property
    def path(self) -> Path:
        """Return the text that `parse` takes again from any folder of this machine; it names no file."""
        of = self.of if self.has_name else str(Path(self.of).expanduser().resolve())
        return Path(self._spelled(of))

    @property
    def tokenizer(self) -> Path | None:
        """Return the folder of the tokeniser's files, or None for a token for each byte."""
        return TOKENIZERS.get(self.of)

    def config(self) -> dict[str, object]:
        """Return the configuration. Raises ModelError for an unknown name or a file without a JSON object."""
        if self.has_name:
            return dict(CONFIGS[self.of])
        path = Path(self.of).expanduser()
        if not path.is_file():
            raise ModelError(f"no synthetic model {self.of}", hint=_known())
        try:
            config = json.loads(file_bytes(path, _MAX_CONFIG_BYTES))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not JSON") from error
        if not isinstance(config, dict):
            raise ModelError(f"{path} holds a {type(config).__name__}, expected an object")
        return config

    def digest(self, config: Mapping[str, object]) -> str:
        """Return the hex SHA-256 over all inputs of the weights: method, seed and configuration."""
        text = json.dumps([_METHOD, self.seed, dict(config)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _spelled(self, of: str) -> str:
        return f"{PREFIX}{of}@{self.seed}" if self.seed else f"{PREFIX}{of}"


def is_synthetic_name(text: str) -> bool:
    """Tell whether ``text`` names a known synthetic model, with any seed.

    Another member may name only these to us: a path is never taken from a peer.
    """
    match = _FORM.fullmatch(text)
    return match is not None and match["of"] in CONFIGS


def describe_tensors(config: Mapping[str, object], spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return every tensor that a checkpoint of this configuration would have, as float32.

    Raises ModelError for a configuration that this module cannot generate weights for.
    """
    if config.get("text_config") is not None:
        raise ModelError(f"{spec.name}: config.json has a text_config, expected a plain decoder's")
    if spec.vocab_size < MIN_VOCABULARY:
        raise ModelError(
            f"{spec.name}: config.json says vocab_size = {spec.vocab_size}, "
            f"expected at least {MIN_VOCABULARY}: a token for each byte and {MIN_VOCABULARY - 256} for turns"
        )
    if spec.num_streams > 1:
        raise ModelError(
            f"{spec.name}: {spec.family} has tables of experts by token id, which cannot be generated",
            hint="use a directory with its weights",
        )
    width = spec.hidden_size
    shapes = {"model.embed_tokens.weight": (spec.vocab_size, width), "model.norm.weight": (width,)}
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, width)
    reader = ConfigReader(config, spec.name)
    family = read_family(reader)
    reader = reader.with_defaults(family.defaults)
    for number, heads in enumerate(read_heads(reader, family, spec.num_layers, width)):
        for suffix, shape in layer_tensors(reader, family, number, heads, width):
            shapes[f"model.layers.{number}.{suffix}"] = shape
    nowhere = Path()
    return {
        name: StoredTensor(name, nowhere, "F32", shape, 0, 4 * math.prod(shape))
        for name, shape in shapes.items()
    }


def drawn_key(described: StoredTensor, seed: int) -> int:
    """Return the 128-bit Philox key of a tensor's numbers."""
    material = hashlib.sha256(f"{_METHOD}/{seed}/{described.name}".encode()).digest()
    return int.from_bytes(material[:16], "little")


def draw_tensor(described: StoredTensor, seed: int) -> torch.Tensor:
    """Generate a tensor's values, float32.

    They are uniform. A matrix has variance 1 / inputs, so that activations neither fade nor grow from layer
    to layer.
    """
    import numpy as np

    # import late, as in `model.checkpoints.checkpoint`: only generating weights needs torch
    import torch

    source = np.random.Philox(key=drawn_key(described, seed))
    shape, count = described.shape, math.prod(described.shape)
    spread = math.sqrt(3 / shape[1]) if len(shape) == 2 else _VARIED
    values = np.empty(count, np.float32)
    for start in range(0, count, 2 * _BLOCK):
        end = min(start + 2 * _BLOCK, count)
        draws = source.random_raw((end - start + 1) // 2).astype("<u8", copy=False)
        values[start:end] = draws.view("<i4")[: end - start]
    values *= np.float32(spread / 2**31)
    if described.name.endswith("norm.weight"):
        values += np.float32(1)
    return torch.from_numpy(values).view(shape)


def describe_values(described: StoredTensor, seed: int) -> str:
    """Return the hex SHA-256 over all inputs of a tensor's values.

    It identifies the values as well as a digest of their bytes would, without generating them.
    """
    text = json.dumps([_METHOD, seed, described.name, described.dtype, list(described.shape)])
    return hashlib.sha256(text.encode()).hexdigest()


def _known() -> str:
    return f"give {PREFIX}NAME or {PREFIX}CONFIG.json; names: {', '.join(CONFIGS)}"
