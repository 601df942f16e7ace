"""Resolve where a model comes from: a bundled name, a Hugging Face directory, a GGUF file, or a seed."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from convoy.config.table import MODEL_HINT
from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor, file_bytes, has_safetensors, read_headers
from convoy.model.checkpoints.formats.describe import describe_stored
from convoy.model.checkpoints.formats.gguf.model import config_bytes, open_gguf
from convoy.model.checkpoints.formats.gguf.split import SUFFIX, find_gguf
from convoy.model.checkpoints.formats.unpacking import StoredLayout
from convoy.model.checkpoints.synthetic import CONFIGS, PREFIX, Synthetic, describe_tensors, is_synthetic_name
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.registry import read_family

_AGAIN = "fetch the model's file again"

# the settings, the tokeniser and the table of tensors of a GGUF file, as a manifest names them
HEADER = "header.gguf"
_OF_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_MAX_TOKENIZER_BYTES = 256 << 20
BUNDLED = ("demo", "demo-mini")
_BUNDLED_DIRECTORY = Path(__file__).resolve().parents[2] / "models"
MAX_CONFIG_BYTES = 16 << 20
_FLOATS = ("F64", "F32", "BF16", "F16")
_LAYER = re.compile(
    r"(?:model\.|model\.language_model\.|language_model\.model\.)layers\.([0-9]{1,6})\.", re.ASCII
)


@dataclass(frozen=True)
class ModelSource:
    """Describe a model on this machine that is not loaded.

    ``digest`` is the hex SHA-256 over the configuration and the names, dtypes and shapes of all tensors.
    Members with different digests have different models. It does not cover the weights' values, unless these
    come from a ``seed``; a `Manifest` does. With a seed, ``path`` is the text that `resolve` takes again, not
    a file's path. ``tensors`` are the tensors as stored; ``layout`` says how quantised ones are unpacked.
    """

    name: str
    path: Path
    config: Mapping[str, object]
    spec: ModelSpec
    digest: str
    tensors: Mapping[str, StoredTensor]
    # set for synthetic weights, which are generated instead of read
    seed: int | None = None
    # of a GGUF file, before its first tensor
    header_bytes: int = 0
    layout: StoredLayout = field(default_factory=StoredLayout)

    @classmethod
    def resolve(cls, name_or_path: str) -> ModelSource:
        """Find a bundled model by name, a directory or GGUF file by path, or a synthetic model by
        ``synthetic:...``.

        Raises ModelError if a directory does not exist, has no config.json or no weights, or holds a model
        type that is not supported.
        """
        if not name_or_path:
            raise ModelError("no model is named", hint=f"{MODEL_HINT}: {', '.join(BUNDLED)}")
        synthetic = Synthetic.parse(name_or_path)
        if synthetic is not None:
            return cls._drawn(synthetic)
        directory = Path(name_or_path).expanduser()
        name = _name_of(directory.resolve())
        if name_or_path in BUNDLED:
            directory, name = _BUNDLED_DIRECTORY / name_or_path, name_or_path
        if directory.suffix == SUFFIX and directory.is_file():
            # a link in a hub's cache leads to a file without the name that shards have
            return cls._of_gguf(directory.absolute())
        if directory.is_file():
            raise ModelError(
                f"{name_or_path} is a file, and no model", hint=f"{MODEL_HINT}: {', '.join(BUNDLED)}"
            )
        if not directory.is_dir():
            raise ModelError(f"no model at {name_or_path}", hint=_how_to_name(name_or_path))
        if not has_safetensors(directory) and (file := find_gguf(directory.resolve())) is not None:
            return cls._of_gguf(file)
        config = read_config(directory / "config.json")
        # report an unsupported model type before missing weights
        read_family(ConfigReader(config, name))
        return cls.described(name, directory.resolve(), config, read_headers(directory))

    @classmethod
    def described(
        cls, name: str, path: Path, config: Mapping[str, object], tensors: Mapping[str, StoredTensor]
    ) -> ModelSource:
        """Describe a model by its stored tensors, wherever these lie. Raises ModelError as `resolve` does."""
        layout = describe_stored(config, tensors, name)
        spec = ModelSpec.from_config(
            *(config, name, layout.shapes(tensors)), layout.kept(tensors), layout.kept_on_card()
        )
        _check_tensors(config, spec.num_layers, tensors, layout)
        return cls(name, path, config, spec, digest_of(config, tensors), tensors, layout=layout)

    @classmethod
    def _of_gguf(cls, path: Path) -> ModelSource:
        model = open_gguf(path)
        source = cls.described(model.name, model.path, model.config, model.tensors)
        return replace(source, header_bytes=model.header_bytes)

    @property
    def is_one_file(self) -> bool:
        """Tell whether ``path`` is a GGUF file, which holds the configuration and the tokeniser too.

        It is the first of several in a split model.
        """
        return self.path.suffix == SUFFIX and self.seed is None

    @property
    def own_files(self) -> dict[str, bytes]:
        """Return the files that a GGUF file stands for, by name: members load config.json without it.

        The tokeniser's files beside it are among them.
        """
        if not self.is_one_file:
            return {}
        beside = self.path.with_name("tokenizer.json").is_file()
        names = [name for name in _OF_TOKENIZER if beside and self.path.with_name(name).is_file()]
        try:
            with self.path.open("rb") as file:
                header = file.read(self.header_bytes)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror or error}") from error
        files = {name: file_bytes(self.path.with_name(name), _MAX_TOKENIZER_BYTES) for name in names}
        return {"config.json": config_bytes(self.config), HEADER: header, **files}

    @classmethod
    def _drawn(cls, synthetic: Synthetic) -> ModelSource:
        config, name = synthetic.config(), synthetic.name
        spec = ModelSpec.from_config(config, name)
        tensors = describe_tensors(config, spec)
        return cls(name, synthetic.path, config, spec, synthetic.digest(config), tensors, synthetic.seed)


def _name_of(directory: Path) -> str:
    """Return a directory's own name, or ``org/name`` for a commit in the hub's cache."""
    kind, _, repo = directory.parent.parent.name.partition("--")
    if kind == "models" and repo and directory.parent.name == "snapshots":
        return repo.replace("--", "/", 1)
    return directory.name


def _how_to_name(wrong: str) -> str:
    """Return the hint for a model that is not there: the name that was probably meant, or every kind."""
    near = difflib.get_close_matches(wrong, (*BUNDLED, *(f"{PREFIX}{size}" for size in CONFIGS)), n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"{MODEL_HINT}: {', '.join(BUNDLED)} (for measurements {PREFIX}{next(iter(CONFIGS))})"


def needs_no_files(name: str) -> bool:
    """Tell whether the name alone identifies the model on any machine, so that a head may send it to its
    peers.
    """
    return name in BUNDLED or is_synthetic_name(name)


def read_config(path: Path) -> dict[str, object]:
    """Read a config.json. Raises ModelError if the file is missing, too long, or not a JSON object."""
    if not path.exists():
        raise ModelError(
            f"{path.parent} has no config.json",
            hint="give the directory itself of a Hugging Face model, with config.json, tokenizer.json and "
            "*.safetensors in it",
        )
    return parse_config(str(path), file_bytes(path, MAX_CONFIG_BYTES))


def parse_config(place: str, data: bytes) -> dict[str, object]:
    """Parse a config.json. Raises ModelError naming ``place`` if it is not a JSON object."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{place} is not JSON", hint=_AGAIN) from error
    if not isinstance(config, dict):
        raise ModelError(f"{place} holds a {type(config).__name__}, expected an object", hint=_AGAIN)
    return config


def digest_of(config: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> str:
    """Return the hex SHA-256 over the configuration and the tensors' names, dtypes and shapes, not their
    values.
    """
    described = [[t.name, t.dtype, list(t.shape)] for t in sorted(tensors.values(), key=lambda t: t.name)]
    text = json.dumps([dict(config), described], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_tensors(
    config: Mapping[str, object], num_layers: int, tensors: Mapping[str, StoredTensor], layout: StoredLayout
) -> None:
    """Raise ModelError, naming file and tensor, for weights of a non-float dtype and for surplus layers.

    A stage compares every tensor that it needs, and its shape, once more when it is built.
    """
    most = num_layers + _num_beside(config)
    for name, tensor in tensors.items():
        is_packed = name in layout.made or layout.whole(name) != name or name in layout.unused
        if not is_packed and name.endswith((".weight", ".bias")) and tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{tensor.path}: {name} has the dtype {tensor.dtype}, expected one of {', '.join(_FLOATS)}",
                hint="config.json names no quantisation that would explain this dtype",
            )
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= most:
            raise ModelError(
                f"{tensor.path}: {name} is of layer {int(layer[1])}, and config.json says that there are "
                f"{num_layers}",
                hint="config.json is of another model, or was changed",
            )


def _num_beside(config: Mapping[str, object]) -> int:
    """Return the number of layers behind the last that predict further tokens; Convoy does not run them."""
    text = config.get("text_config")
    for settings in (config, text if isinstance(text, Mapping) else {}):
        number = settings.get("num_nextn_predict_layers")
        if isinstance(number, int) and 0 < number < 100:
            return number
    return 0
