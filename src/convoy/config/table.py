"""The table of settings: one field for each key of ``convoy.toml``, with its type, default and texts.

The field is the only place of a default. The file's parser reads these classes. The options of other rooms
take their defaults from `CLUSTER`, `SERVE`, `MODEL`, `ENGINE` and `PLAN`. `cli.flags.table` makes the flags,
and `scripts/settings.py` makes the tables of docs/configuration.md.

Every table and key is optional. A verb asks for those that it needs with methods of `config.settings.Config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from convoy.config.durations import kept_s
from convoy.config.kernels import AUTO, RequestedCompute, RequestedKernel, RequestedKvDtype, computing_kernel

DEFAULT_PEER_PORT = 7777
# The hint about a model that is missing; an example follows.
MODEL_HINT = "give a Hugging Face directory, a .gguf file, org/name on the hub, or a bundled model"
# bench/METHODOLOGY.md, under `convoy bench spec`, gives the reason.
DEFAULT_SPECULATE = 8
# Tokens of a prompt in one step. A host takes seconds for the longer one, and no other request gets a token
# meanwhile. A device takes tens of milliseconds, and with fewer rows it waits for its memory.
HOST_CHUNK, DEVICE_CHUNK = 256, 2048
# Seconds of a device's chunks in a step beside decodes. One H200 takes 0.05 for 2,048 tokens of an 8B model.
CHUNK_S = 0.06
HOST_BATCH, DEVICE_BATCH = 32, 256
# The most ranks of one stage, steps in flight, and tokens guessed at once.
MAX_RANKS, MAX_IN_FLIGHT, MAX_DRAFT = 16, 64, 64
# Of a fleet: the tokens of an answer whose request has no limit, and the bounds of a coordinator's queue.
FLEET_ANSWER_TOKENS = 1024
QUEUE_WAITING, QUEUE_PER_ACCOUNT, QUEUE_WAIT_S = 1000, 200, 120.0
# An empty entry has a few bytes on the wire, and a hundred or two in memory. So lists are bounded by the need
# of a step, not by the size of a frame. Each row, sample request and answer of a step has a token of its own.
MAX_STEP_TOKENS = 16 * 1024

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrNone = Annotated[int, msgspec.Meta(ge=0)]
Ranks = Annotated[int, msgspec.Meta(ge=2, le=MAX_RANKS)]
InFlight = Annotated[int, msgspec.Meta(ge=0, le=MAX_IN_FLIGHT)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
HubUrl = Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s]{1,200}\Z")]
Parallel = Literal["auto", "pipeline", "tensor", "single"]


@dataclass(frozen=True, slots=True)
class Flag:
    """Describe the flag of a setting. ``names`` are its names if they differ from the key.

    ``least`` and ``most`` limit a number on the command line. ``shown`` describes the default there.
    """

    help: str
    names: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    shown: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """Describe a key for its reader: in the docs, above the key in a ``convoy.toml``, and as a flag.

    ``text`` is one line of plain text, and ``more`` adds Markdown in the docs. ``shown`` describes a default
    that the value does not tell.
    """

    text: str
    more: str = ""
    shown: str | None = None
    flag: Flag | None = None


class ClusterConfig(msgspec.Struct, frozen=True):
    """Hold [cluster]: this member's name, keys, trust and policy."""

    name: Annotated[Name | None, Setting("this member's name in the roster")] = None
    identity: Annotated[
        Path | None, Setting("folder of this member's keys", ", from `convoy identity new`")
    ] = None
    roster: Annotated[
        Path | None,
        Setting(
            "the signed roster", ", from `convoy roster new`; read 4 times a second while the member runs"
        ),
    ] = None
    operator_key: Annotated[
        str | None, Setting("the operator's public key", ", as `convoy roster new` printed it")
    ] = None
    policy: Annotated[
        Path | None,
        Setting(
            "file that says what others must prove, and which layers stay where",
            " ([attestation.md](attestation.md))",
            flag=Flag("A policy file with [[placement]] rules.", shown="the config's"),
        ),
    ] = None
    tpm: Annotated[
        Name | None,
        Setting(
            "this machine's TPM, such as device:/dev/tpmrm0",
            ": proves the machine after it is enrolled (`convoy attest`)",
        ),
    ] = None
    standby: Annotated[
        bool,
        Setting(
            "hold layers only after another member is lost",
            " ([survival.md](survival.md)); for peers only",
            flag=Flag(
                "Hold layers only once another member is lost.",
                ("--standby/--no-standby",),
                shown="the config's",
            ),
        ),
    ] = False


class ListenConfig(msgspec.Struct, frozen=True):
    """Hold [listen]: the address where peers reach this member."""

    # A listener tells nothing to a caller that the roster does not list.
    host: Annotated[Name, Setting("address of this machine to listen on for other members")] = "0.0.0.0"  # noqa: S104
    port: Annotated[
        Port | None,
        Setting(
            "port to listen on",
            ". A port other than the roster's makes sense only behind a forwarded port",
            shown="the roster's",
            flag=Flag(
                "Port to listen on.", least=1, most=65535, shown=f"{DEFAULT_PEER_PORT}, later the roster's"
            ),
        ),
    ] = None
    discover: Annotated[
        bool,
        Setting(
            "find members on the local network by mDNS, and be found",
            "; needs `pip install 'WHEEL[discovery]'`",
            flag=Flag(
                "Find members on the local network (mDNS), and be found.",
                ("--discover/--no-discover",),
                shown="the config's",
            ),
        ),
    ] = False


class ServeConfig(msgspec.Struct, frozen=True):
    """Hold [serve]: the HTTP server of a head."""

    host: Annotated[
        Name,
        Setting(
            "HTTP address of a head", "; off loopback it needs `api_key_file`", flag=Flag("HTTP address.")
        ),
    ] = "127.0.0.1"
    port: Annotated[
        Port, Setting("HTTP port", "; 0: any", flag=Flag("HTTP port; 0 lets the system choose."))
    ] = 8765
    api_key_file: Annotated[
        Path | None,
        Setting(
            "file with one API key, or with several named ones",
            " ([api.md](api.md#api-keys))",
            flag=Flag("File with one or more API keys: see `convoy keys`."),
        ),
    ] = None
    max_waiting: Annotated[Count, Setting("answers that may wait before a client gets 429")] = 256
    drain_s: Annotated[
        Seconds,
        Setting(
            "seconds that running answers may continue after Ctrl-C or SIGTERM",
            "; a second signal ends them at once",
        ),
    ] = 30.0
    allow_unauthenticated: Annotated[
        bool, Setting("also off loopback, admit any client that can reach the port, without a key")
    ] = False
    tls_certificate: Annotated[
        Path | None,
        Setting(
            "PEM certificate to serve https, with tls_key",
            flag=Flag("PEM certificate: answer https, with --tls-key."),
        ),
    ] = None
    tls_key: Annotated[
        Path | None, Setting("PEM key of the certificate", flag=Flag("PEM key of the certificate."))
    ] = None
    allowed_hosts: Annotated[
        tuple[Name, ...],
        Setting(
            "list of further names that the server answers to",
            ', such as `["head.example"]`',
            flag=Flag("A further host name of this server; repeatable.", ("--allowed-host",)),
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[Name, ...],
        Setting(
            "list of sites with pages that may call the server",
            ', such as `["https://chat.example"]`',
            flag=Flag("A site with pages that may call this server; repeatable.", ("--allowed-origin",)),
        ),
    ] = ()
    store_responses: Annotated[
        bool,
        Setting(
            "keep responses of POST /v1/responses in memory for an hour, each for the key that made it",
            " ([api.md](api.md#stored-responses))",
            flag=Flag(
                "Keep responses of POST /v1/responses in memory for an hour.",
                ("--store-responses/--no-store-responses",),
            ),
        ),
    ] = False
    served_model_name: Annotated[
        Name | None,
        Setting(
            "name of the model in every API, in place of its own",
            ", such as `gpt-4o` for a tool with fixed names",
            flag=Flag("Name of the model in every API, in place of its own."),
        ),
    ] = None
    also: Annotated[
        tuple[Name, ...],
        Setting(
            "list of further models that requests may name, each as `MODEL` or `NAME=MODEL`",
            "; one model is loaded at a time ([models.md](models.md#several-models))",
            flag=Flag("A further model that requests may name, as [NAME=]MODEL; repeatable."),
        ),
    ] = ()
    model_wait_s: Annotated[
        Seconds,
        Setting(
            "seconds that a request may wait for its model before it gets 503",
            "; `max_waiting` bounds how many wait",
        ),
    ] = 300.0
    keep_alive: Annotated[
        float | str | None,
        Setting(
            "time without a request after which the model is unloaded: seconds, 5m, 1h, never",
            ". The next request loads it again. A request's `keep_alive` replaces it until the next request",
            shown="never",
            flag=Flag("Time without a request before the model is unloaded: 300, 5m, 1h.", shown="never"),
        ),
    ] = None
    http_process: Annotated[
        bool | None,
        Setting(
            "serve HTTP in a process of its own beside the engine's",
            ": a crash there costs its streams alone ([survival.md](survival.md#the-front-process))",
            shown="on where the head computes on CUDA",
            flag=Flag(
                "Serve HTTP in a process of its own beside the engine's.",
                ("--http-process/--no-http-process",),
            ),
        ),
    ] = None

    @property
    def keep_alive_s(self) -> float | None:
        """Return the seconds of `keep_alive`; None keeps the model. Raises ConfigError for no duration."""
        return None if self.keep_alive is None else kept_s(self.keep_alive)


class ModelConfig(msgspec.Struct, frozen=True):
    """Hold [model]: the model to run, and this machine's share in it."""

    name: Annotated[
        Name | None,
        Setting(
            "a bundled model, or a head's org/name@revision on the Hugging Face hub",
            ". A peer without `name` and `path` gets its layers from the hub or the head",
        ),
    ] = None
    path: Annotated[Path | None, Setting("a model's directory or .gguf file, in place of name")] = None
    kernel: Annotated[RequestedKernel, Setting("how the linears compute", ": see [kernels](#kernels)")] = AUTO
    compute: Annotated[
        RequestedCompute,
        Setting(
            "exact; int8: faster, with rows rounded to 8 bits; or fp8: the same with floats, on CUDA",
            " ([its error](verify.md#8-bit-products)); the head's counts",
            flag=Flag(
                "exact; int8: round rows to 8 bits for rounded weights, faster, with an error; fp8: on CUDA."
            ),
        ),
    ] = "exact"
    device: Annotated[
        Name,
        Setting(
            "the device that computes",
            ": `auto`, `cpu`, `mlx`, `cuda`, `cuda:N` or several: see [devices](#devices)",
            flag=Flag(
                "auto, cpu, mlx, cuda, cuda:N, several cuda:N with commas; "
                "for ranks cpu+cpu or cuda:0+cuda:1."
            ),
        ),
    ] = "auto"
    activation_dtype: Annotated[
        Literal["float32"], Setting("type of the data that crosses a link; the same on every member")
    ] = "float32"
    num_threads: Annotated[Count | None, Setting("CPU threads", shown="all cores")] = None
    memory_gb: Annotated[
        Annotated[float, msgspec.Meta(ge=0)],
        Setting(
            "memory in GB for weights and K/V together",
            ". [planning.md](planning.md) has the memory that a step needs in addition",
            shown="0: most of the free memory",
        ),
    ] = 0.0
    cache: Annotated[
        Path | None,
        Setting(
            "private folder for parts of models and digests of files",
            " ([models.md](models.md)); `convoy models` shows it and `convoy rm` cleans it",
            shown="`convoy` in the user's cache",
            flag=Flag("Folder for the files that the head sends.", shown="the user's cache"),
        ),
    ] = None
    weights_from: Annotated[
        Literal["auto", "head", "hub"],
        Setting(
            "where a peer without files gets its layers",
            ": see [sources of weights](#sources-of-weights)",
            flag=Flag(
                "Source for members without files: auto (the hub, then the head), head, hub.",
                ("--weights-from",),
            ),
        ),
    ] = "auto"
    signed: Annotated[
        Path | None,
        Setting(
            "file from `convoy manifest sign`: the member runs no other model",
            flag=Flag("A file from `convoy manifest sign`: run only its model."),
        ),
    ] = None
    hub: Annotated[
        HubUrl | None,
        Setting(
            "address of another Hugging Face hub",
            ", for a head's `org/name` and for this member's own layers",
            shown="the public one",
        ),
    ] = None

    @property
    def wanted_kernel(self) -> str:
        """Return the kernel that both keys ask for together. Raises UsageError if they do not go together."""
        return computing_kernel(self.kernel, self.compute)


class EngineConfig(msgspec.Struct, frozen=True):
    """Hold [engine]: limits of the scheduler. In many of them 0 has a meaning of its own."""

    max_batch: Annotated[
        Count | None,
        Setting(
            "sequences that run at once; 1: one after the other",
            shown=f"{HOST_BATCH}; on CUDA as many as K/V has room for, {HOST_BATCH} to {DEVICE_BATCH}",
            flag=Flag(
                "Sequences that run at once; 1: one after another.",
                least=1,
                shown=f"{HOST_BATCH}; up to {DEVICE_BATCH} where all stages are on CUDA",
            ),
        ),
    ] = None
    max_step_tokens: Annotated[Count, Setting(f"tokens in one step; at most {MAX_STEP_TOKENS:,}")] = 512
    prefill_chunk: Annotated[
        CountOrNone,
        Setting(
            "maximum tokens of one prompt in one step",
            "; see [below](#chunks-and-guesses). A value over `max_step_tokens` raises that too",
            shown=f"0: {HOST_CHUNK}, or {DEVICE_CHUNK} on CUDA",
            flag=Flag(
                "Tokens of one prompt in one step.",
                least=1,
                shown=f"{HOST_CHUNK}; {DEVICE_CHUNK} where all stages are on CUDA",
            ),
        ),
    ] = 0
    prefill_window: Annotated[
        InFlight,
        Setting(
            "chunks of one prompt in flight while no other request decodes",
            shown="0: as many as micro-batches",
            flag=Flag("Chunks of one prompt in flight, at most 64.", least=0),
        ),
    ] = 0
    micro_batches: Annotated[
        InFlight,
        Setting(
            "steps in flight during decodes, and as many that wait behind them",
            shown="0: as many as stages",
            flag=Flag(f"Steps in flight, at most {MAX_IN_FLIGHT}.", least=0),
        ),
    ] = 0
    speculate: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFT)] | None,
        Setting(
            "maximum tokens guessed at once; 0 guesses nothing",
            "; see [below](#chunks-and-guesses)",
            shown=f"{DEFAULT_SPECULATE} in exact mode and with rounded linears, otherwise 0",
            flag=Flag(
                "Tokens guessed at once, from the text so far; 0: none.",
                least=0,
                most=MAX_DRAFT,
                shown=str(DEFAULT_SPECULATE),
            ),
        ),
    ] = None
    share_across_keys: Annotated[
        bool,
        Setting(
            "requests share the K/V of a common prefix across API keys",
            ". One client can then infer from timing what another asked",
        ),
    ] = False
    level_chunks: Annotated[
        bool,
        Setting(
            "later chunks of a long prompt get shorter, so that all take about the same time",
            " as attention grows, in multiples of 16 tokens; false: all of one size",
        ),
    ] = True
    max_model_len: Annotated[
        CountOrNone,
        Setting(
            "tokens of the longest prompt and answer together",
            "; more than the model's own context is refused",
            shown="0: the model's own context",
            flag=Flag("Longest prompt and answer together, in tokens.", least=1, shown="the model's own"),
        ),
    ] = 0
    block_size: Annotated[Count, Setting("tokens in a K/V block; divides 64")] = 16
    kv_dtype: Annotated[
        RequestedKvDtype,
        Setting(
            "type in which every stage holds K/V",
            ": see [K/V](#kv)",
            shown="auto: f32 on hosts, bf16 on CUDA",
            flag=Flag("Type of K/V: auto, f32, bf16, f16 or q8.", shown="auto: f32; on CUDA bf16"),
        ),
    ] = AUTO
    num_blocks: Annotated[
        CountOrNone,
        Setting(
            "K/V blocks, up to a full batch of full contexts",
            "; see [blocks](#blocks)",
            shown="0: as many as fit",
        ),
    ] = 0


class PlanConfig(msgspec.Struct, frozen=True):
    """Hold [plan]: the members' layers, and how long to wait for members."""

    layers: Annotated[
        dict[str, str] | None,
        Setting(
            "which member holds which layers",
            ': `{ alpha = "0:5,output", beta = "6:11" }`; see [layouts](#layouts)',
            shown="by memory",
        ),
    ] = None
    wait_s: Annotated[
        Seconds,
        Setting(
            "seconds that a head waits for absent members at its start; 0: none",
            ". It then starts without them, if the others can hold the model ([survival.md](survival.md))",
            flag=Flag(
                "Seconds to wait for absent members before a start without them; 0: none.",
                ("--wait",),
                least=0,
            ),
        ),
    ] = 60.0
    recover_wait_s: Annotated[
        Seconds,
        Setting(
            "seconds that a head waits for a lost member that no other member can replace",
            flag=Flag("Seconds to wait for a lost member to return.", ("--recover-wait",), least=0),
        ),
    ] = 60.0
    parallel: Annotated[
        Parallel,
        Setting(
            "how members share the model",
            " ([tensor-parallel.md](tensor-parallel.md))",
            flag=Flag("How members share the model: auto, pipeline, tensor or single."),
        ),
    ] = "auto"
    ranks: Annotated[
        Ranks | None,
        Setting(
            "members that hold each stage together, where they share its layers",
            shown="as many as possible",
            flag=Flag(
                "Members that hold each stage together.", least=2, most=MAX_RANKS, shown="as many as can"
            ),
        ),
    ] = None


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold [telemetry]; it needs the extra ``telemetry``."""

    traces: Annotated[
        Url | None,
        Setting(
            "OTLP/HTTP collector for spans of a head's requests",
            ", such as `http://127.0.0.1:4318` ([fleet.md](fleet.md#traces-and-logs))",
            flag=Flag("Send spans to this OTLP/HTTP collector, such as http://127.0.0.1:4318."),
        ),
    ] = None


TABLES: dict[str, type[msgspec.Struct]] = {
    "cluster": ClusterConfig,
    "listen": ListenConfig,
    "serve": ServeConfig,
    "model": ModelConfig,
    "engine": EngineConfig,
    "plan": PlanConfig,
    "telemetry": TelemetryConfig,
}
# The defaults, for the options of other rooms.
CLUSTER, SERVE, MODEL = ClusterConfig(), ServeConfig(), ModelConfig()
ENGINE, PLAN = EngineConfig(), PlanConfig()


@dataclass(frozen=True, slots=True)
class SettingRow:
    """Hold a key's row of the table. ``kind`` is its type, without None and limits; ``limits`` are text."""

    table: str
    key: str
    kind: Any
    limits: str
    default: Any
    setting: Setting

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the values of a closed set, or nothing."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def default_text(self) -> str:
        """Return the default as a reader sees it; empty where there is none."""
        if self.setting.shown is not None:
            return self.setting.shown
        if self.default is None or self.default == ():
            return ""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def rows(table: str) -> Iterator[SettingRow]:
    """Yield the rows of ``[table]`` in the order of the table."""
    hints = get_type_hints(TABLES[table], include_extras=True)
    for field in msgspec.structs.fields(TABLES[table]):
        setting = next(one for one in hints[field.name].__metadata__ if isinstance(one, Setting))
        kind, limits = _plain(hints[field.name])
        yield SettingRow(table, field.name, kind, limits, field.default, setting)


def row(table: str, key: str) -> SettingRow:
    """Return one row. Raises KeyError for a key that the table lacks."""
    return {one.key: one for one in rows(table)}[key]


def _plain(kind: Any) -> tuple[Any, str]:
    """Return a type without None and without limits, and the limits of a number as text."""
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        plain, limits = _plain(inner)
        metas = [one for one in notes if isinstance(one, msgspec.Meta)]
        return plain, next(filter(None, (_limits(meta) for meta in metas)), limits)
    several = [one for one in get_args(kind) if one is not type(None)]
    if type(None) in get_args(kind) and len(several) == 1:
        return _plain(several[0])
    return kind, ""


def _limits(meta: msgspec.Meta) -> str:
    if meta.ge is None:
        return ""
    return f"{meta.ge} or more" if meta.le is None else f"{meta.ge} to {meta.le}"
