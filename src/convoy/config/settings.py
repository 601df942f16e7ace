"""``convoy.toml``: one file for a member, read into frozen values.

    [cluster]  name, identity (folder), roster (file), operator_key (as `convoy roster new` prints it),
               policy (file: the evidence that others must show), tpm (such as device:/dev/tpmrm0, for
               this machine's evidence), standby (a peer: hold layers only once another member is lost)
    [listen]   host, port, discover                         where peers reach this member
    [serve]    host, port, api_key_file, allow_unauthenticated, tls_certificate, tls_key, allowed_hosts,
               allowed_origins, max_waiting, drain_s                     a head's HTTP server
    [model]    name or path, kernel, device, activation_dtype, num_threads, memory_gb, cache (folder), hub,
               weights_from (head, hub or auto), signed (file: the manifest that the operator signed)
    [engine]   max_batch, max_step_tokens, prefill_chunk, level_chunks, prefill_window, micro_batches (0: as
               many as stages), speculate (0: no guesses), share_across_keys, max_model_len (0: the model's
               own context), block_size, num_blocks (0: as many as fit)
    [telemetry] traces (the URL of an OTLP/HTTP collector for spans of a head's requests)
    [plan]     layers = { alpha = "0:5,output", beta = "6:11" }, wait_s, recover_wait_s,
               parallel (auto, pipeline, tensor or single), ranks (members that hold a stage together)

Every table and key is optional here. A verb asks for a key that it needs with a `require_` method.
Paths are relative to the file. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import base64
import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from convoy.errors import ConfigError
from convoy.plan.spec.kernels import AUTO, RequestedKernel

DEFAULT_PEER_PORT = 7777
DEFAULT_SERVE_PORT = 8765
# bench/METHODOLOGY.md, under `convoy bench spec`, gives the reason.
DEFAULT_SPECULATE = 8
_MAX_FILE_BYTES = 1 << 20
_OPERATOR_KEY_BYTES = 32

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Ranks = Annotated[int, msgspec.Meta(ge=2, le=16)]
InFlight = Annotated[int, msgspec.Meta(ge=0, le=64)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Complaint = Callable[[str], str]
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold [telemetry]. ``traces`` is the URL of an OTLP/HTTP collector."""

    traces: Annotated[str, msgspec.Meta(min_length=1, max_length=500)] | None = None


class ClusterConfig(msgspec.Struct, frozen=True):
    """Hold [cluster]: this member's name, keys, trust and policy. ``standby`` is for peers only."""

    name: Name | None = None
    identity: Path | None = None
    roster: Path | None = None
    operator_key: str | None = None
    policy: Path | None = None
    tpm: Name | None = None
    standby: bool = False


class ListenConfig(msgspec.Struct, frozen=True):
    """Hold [listen]: the address where peers reach this member.

    ``host`` is an address of this machine or 0.0.0.0. Without ``port`` the roster's port counts. ``discover``
    announces this member on the local network and looks there for others.
    """

    # A listener tells nothing to a caller that the roster does not list.
    host: Name = "0.0.0.0"  # noqa: S104
    port: Port | None = None
    discover: bool = False


class ServeConfig(msgspec.Struct, frozen=True):
    """Hold [serve]: the HTTP server of a head.

    ``allow_unauthenticated`` allows requests without a key also off loopback. ``allowed_hosts`` are further
    host names of the server. ``allowed_origins`` are sites with pages that may call it.
    """

    host: Name = "127.0.0.1"
    port: Port = DEFAULT_SERVE_PORT
    api_key_file: Path | None = None
    max_waiting: Count = 256
    drain_s: Seconds = 30.0
    allow_unauthenticated: bool = False
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    allowed_hosts: tuple[Name, ...] = ()
    allowed_origins: tuple[Name, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True):
    """Hold [model]: the model to run, and this machine's share in it.

    ``memory_gb`` 0 means the free memory at the start. ``device`` is auto, cpu, cuda, cuda:N, several cuda:N
    with commas, cpu+cpu, or cuda:0+cuda:1. ``cache`` is the folder for a peer's files from a head, and for
    every member's digests of files. ``hub`` is the address of a Hugging Face hub other than the public one.
    ``weights_from`` is the source for a peer without files; a head with "head" tells its peers of no hub.
    ``signed`` is the only model that may run, a file of `convoy manifest sign`.
    """

    name: Name | None = None
    path: Path | None = None
    kernel: RequestedKernel = AUTO
    device: Name = "auto"
    activation_dtype: Literal["float32"] = "float32"
    num_threads: Count | None = None
    memory_gb: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    cache: Path | None = None
    weights_from: Literal["auto", "head", "hub"] = "auto"
    signed: Path | None = None
    hub: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s]{1,200}\Z")] | None = None


class EngineConfig(msgspec.Struct, frozen=True):
    """Hold [engine]: limits of the scheduler.

    0 has a meaning of its own. ``max_model_len``: the model's own context. ``num_blocks``: as many as fit in
    memory. ``micro_batches``: as many as stages. ``prefill_window``: as many as micro-batches. ``speculate``:
    no guesses; None guesses `DEFAULT_SPECULATE` tokens where that changes no text.
    """

    max_batch: Count = 32
    max_step_tokens: Count = 512
    prefill_chunk: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefill_window: InFlight = 0
    micro_batches: InFlight = 0
    speculate: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    share_across_keys: bool = False
    level_chunks: bool = True
    max_model_len: Annotated[int, msgspec.Meta(ge=0)] = 0
    block_size: Count = 16
    num_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0


class PlanConfig(msgspec.Struct, frozen=True):
    """Hold [plan]: the members' layers, and how long to wait for members.

    Without ``layers``, memory decides. A name in ``layers`` may join ranks, as in "alpha+beta". ``wait_s`` is
    for the start. ``recover_wait_s`` is for a lost member that no other can replace. ``parallel`` is how
    members share the model. ``ranks`` is the number of ranks of each stage, None for as many as possible.
    """

    layers: dict[str, str] | None = None
    wait_s: Seconds = 60.0
    recover_wait_s: Seconds = 60.0
    parallel: Literal["auto", "pipeline", "tensor", "single"] = "auto"
    ranks: Ranks | None = None


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
    _check_names(tables, _TABLES, lambda name: f"{path}: there is no table [{name}]")
    read: dict[str, Any] = {}
    for name, kind in _TABLES.items():
        table = tables.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} is {_shown(table)}, expected a table [{name}]")
        read[name] = _read_table(kind, name, table, path)
    config = Config(**read, path=path)
    if config.model.name is not None and config.model.path is not None:
        raise ConfigError(f"{path}: [model] has both name and path, expected one of them")
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
        raise ConfigError(f"{what} has {len(key)} bytes, expected {_OPERATOR_KEY_BYTES}")
    return key


def read_api_key(file: Path) -> str:
    """Return the one key that a client sends. Raises ConfigError if there is none, or others can read it."""
    from convoy.api.keys.key_file import read_client_key

    return read_client_key(file)


_TABLES: dict[str, type[msgspec.Struct]] = {
    "cluster": ClusterConfig,
    "listen": ListenConfig,
    "serve": ServeConfig,
    "model": ModelConfig,
    "engine": EngineConfig,
    "plan": PlanConfig,
    "telemetry": TelemetryConfig,
}


def _parse(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            # One byte more than the limit shows a longer file without reading all of it.
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {_reason(error)}", hint=_how_to_read(error, path)) from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {_MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not TOML: {str(error).lower()}",
            hint='mend it: a line is [table] or key = value, and text is in quotes, as name = "alpha"; '
            "docs/configuration.md has the keys",
        ) from None


def _how_to_read(error: OSError, path: Path) -> str | None:
    if isinstance(error, FileNotFoundError):
        return "`convoy invite` and `convoy join -` write one in .convoy; docs/configuration.md has its keys"
    if isinstance(error, IsADirectoryError):
        return f"name the file itself: {path / 'convoy.toml'}"
    return f"chmod u+r {path}" if isinstance(error, PermissionError) else None


def _read_table(kind: type[S], name: str, table: Mapping[str, object], path: Path) -> S:
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    _check_names(table, fields, lambda key: f"{path}: [{name}] has no key {key}")
    try:
        read = msgspec.convert(dict(table), kind, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`").removesuffix("[...]")
        # For a closed set of values the message lists them.
        choices = get_args(fields[key]) if get_origin(fields[key]) is Literal else ()
        expected = f"expected {', '.join(choices)}" if choices else reason[:1].lower() + reason[1:]
        raise ConfigError(f"{path}: [{name}] {key} is {_shown(table[key])}: {expected}") from None
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
