"""Read ``convoy.toml``, one file for a member, into frozen values; `config.table` has its keys.

Paths are relative to the file. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import base64
import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from convoy.config.table import (
    TABLES,
    ClusterConfig,
    EngineConfig,
    ListenConfig,
    ModelConfig,
    PlanConfig,
    ServeConfig,
    TelemetryConfig,
    row,
)
from convoy.config.type_resolution import resolved
from convoy.config.type_words import TOML_WORDS, in_words
from convoy.errors import ConfigError

_VALUES = "docs/configuration.md has the values of every key, under [{}]"

_MAX_FILE_BYTES = 1 << 20
_OPERATOR_KEY_BYTES = 32

Complaint = Callable[[str], str]
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class Config(msgspec.Struct, frozen=True):
    """Hold the whole file. ``path`` is the file itself, or None for the defaults of a command without one."""

    cluster: ClusterConfig = ClusterConfig()
    listen: ListenConfig = ListenConfig()
    serve: ServeConfig = ServeConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    plan: PlanConfig = PlanConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    path: Path | None = None

    def require_name(self) -> str:
        return self._required("cluster", "name", self.cluster.name)

    def require_identity(self) -> Path:
        return self._required("cluster", "identity", self.cluster.identity)

    def require_roster(self) -> Path:
        return self._required("cluster", "roster", self.cluster.roster)

    def require_operator_key(self) -> bytes:
        """Return the 32 bytes of the key. Raises ConfigError if it is missing or no key."""
        text = self._required("cluster", "operator_key", self.cluster.operator_key)
        return decode_public_key(text, f"{self._file}: [cluster] operator_key")

    def model_name(self) -> str | None:
        """Return [model] name, or path as text, for `ModelSource.resolve`."""
        return self.model.name if self.model.path is None else str(self.model.path)

    @property
    def _file(self) -> str:
        return "convoy.toml" if self.path is None else str(self.path)

    def _required(self, table: str, key: str, value: T | None) -> T:
        if value is None:
            raise ConfigError(
                f"{self._file}: [{table}] lacks {key}",
                hint=f"add {key} under [{table}] in the file given by --config",
            )
        return value


def load_config(path: Path | None) -> Config:
    """Read a file; None gives the defaults. Raises ConfigError, naming file, table and key."""
    if path is None:
        return Config()
    tables = _parse(path)
    _check_names(tables, TABLES, lambda name: f"{path}: there is no table [{name}]")
    read: dict[str, Any] = {}
    for name, kind in TABLES.items():
        table = tables.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {name} is {_shown(table)}, expected a table [{name}]", hint=_VALUES.format(name)
            )
        read[name] = _read_table(kind, name, table, path)
    config = Config(**read, path=path)
    # Raises for a text that is no duration.
    config.serve.keep_alive_s  # noqa: B018
    if config.model.name is not None and config.model.path is not None:
        raise ConfigError(
            f"{path}: [model] has both name and path, expected one of them",
            hint="remove one of the two lines",
        )
    return config


def override(struct: S, **flags: object) -> S:
    """Return ``struct`` with the given flags (not None) in place of the file's values."""
    return msgspec.structs.replace(
        struct, **{name: value for name, value in flags.items() if value is not None}
    )


def decode_public_key(text: str, what: str) -> bytes:
    """Return 32 bytes from hex, as rosters show keys, or from base64. Raises ConfigError naming ``what``."""
    try:
        # The length tells hex from base64.
        is_hex = len(text) == 2 * _OPERATOR_KEY_BYTES
        key = bytes.fromhex(text) if is_hex else base64.b64decode(text, validate=True)
    except ValueError:
        raise ConfigError(
            f"{what} is neither hex nor base64", hint="copy it from `convoy roster show`"
        ) from None
    if len(key) != _OPERATOR_KEY_BYTES:
        raise ConfigError(
            f"{what} has {len(key)} bytes, expected {_OPERATOR_KEY_BYTES}",
            hint="copy it from `convoy roster show`",
        )
    return key


def _parse(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            # One byte more than the limit shows a longer file without reading all of it.
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {_reason(error)}", hint=_how_to_read(error, path)) from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} is longer than {_MAX_FILE_BYTES} bytes", hint="is it the right file? check the path"
        )
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file", hint="is it the right file? check the path") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not TOML: {str(error).lower()}",
            hint='mend it: a line is [table] or key = value, and text is in quotes, as name = "alpha"; '
            "docs/configuration.md has the keys",
        ) from None


def _how_to_read(error: OSError, path: Path) -> str | None:
    if isinstance(error, FileNotFoundError):
        return (
            "`convoy serve MODEL --invite` writes .convoy/convoy.toml on the first machine, and "
            "`convoy join -` on each other; docs/configuration.md has its keys"
        )
    if isinstance(error, IsADirectoryError):
        return f"name the file itself: {path / 'convoy.toml'}"
    return f"chmod u+r {path}" if isinstance(error, PermissionError) else None


def _read_table(kind: type[S], name: str, table: Mapping[str, object], path: Path) -> S:
    keys = dict.fromkeys(kind.__struct_fields__)
    _check_names(table, keys, lambda key: f"{path}: [{name}] has no key {key}")
    try:
        read = msgspec.convert(dict(table), resolved(kind), dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        reason, where = in_words(str(error), TOML_WORDS)
        assert where is not None, "each value of a table has a key"
        # An index follows the key of a list.
        key = where.partition("[")[0]
        # For a closed set of values the message lists them.
        choices = row(name, key).choices
        expected = f"expected {', '.join(choices)}" if choices else reason
        raise ConfigError(
            f"{path}: [{name}] {key} is {_shown(table[key])}: {expected}", hint=_VALUES.format(name)
        ) from None
    return _beside(read, path.parent)


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    raise ValueError("expected a path as text")


def _beside(struct: S, folder: Path) -> S:
    # Paths in a file are relative to the file's folder, and not to the working folder.
    paths = {name: getattr(struct, name) for name in struct.__struct_fields__}
    return msgspec.structs.replace(
        struct, **{name: folder / value for name, value in paths.items() if isinstance(value, Path)}
    )


def _check_names(given: Mapping[str, object], known: Mapping[str, object], complain: Complaint) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(complain(name), hint=hint)


def _shown(value: object) -> str:
    return "a table" if isinstance(value, dict) else repr(value)


def _reason(error: Exception) -> str:
    return (error.strerror or "unreadable").lower() if isinstance(error, OSError) else "it is not UTF-8 text"
