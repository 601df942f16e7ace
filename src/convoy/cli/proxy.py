"""``convoy proxy``: run beside a user's tools, and seal their requests to a provider that the user trusts.

proxy.toml has the keys coordinator, api_key_file, trust_providers, trust_operators, allow_plain and
default_max_tokens. Its tables are [telemetry] with traces, and [evidence], which `cli.running.trust_rules`
describes. A flag overrides the file, but trusted keys of both count.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from convoy.cli.flags.traces import TracesFlag, tracing
from convoy.cli.running.endpoint import client_key
from convoy.cli.running.process import announced
from convoy.cli.running.start import settle_memory
from convoy.cli.running.trust_rules import EvidenceTable, LevelName, rules_of
from convoy.cli.show.output import JsonFlag, print_draining, print_ended, print_fields, print_json_line
from convoy.config.settings import override
from convoy.config.table import FLEET_ANSWER_TOKENS, TelemetryConfig
from convoy.config.toml_file import read_toml
from convoy.errors import UsageError
from convoy.sdk.endpoint import KEY_VARIABLE

if TYPE_CHECKING:
    from convoy.fleet.proxy.trust import Trust


CoordinatorArgument = Annotated[
    str | None, typer.Argument(help="https://HOST[:PORT]; http:// only to this machine.")
]
ConfigFlag = Annotated[Path | None, typer.Option(help="proxy.toml: these settings, and the trusted keys.")]
KeyFlag = Annotated[
    Path | None, typer.Option(help="File with your API key at the coordinator.  [default: CONVOY_API_KEY]")
]
ProviderFlag = Annotated[list[str] | None, typer.Option(help="Seal to the provider that prints this key.")]
OperatorFlag = Annotated[
    list[str] | None, typer.Option(help="Seal to providers that this operator's key has certified.")
]
PlainFlag = Annotated[
    bool, typer.Option("--allow-plain", help="Without a trusted provider, let the coordinator read requests.")
]
LevelFlag = Annotated[
    LevelName | None,
    typer.Option(help="The lowest level that a provider's evidence must prove.  [default: none]"),
]
PortFlag = Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 lets the system choose.")]


class ProxyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the whole proxy.toml."""

    coordinator: str | None = None
    api_key_file: str | None = None
    trust_providers: list[str] = []
    trust_operators: list[str] = []
    allow_plain: bool = False
    default_max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = FLEET_ANSWER_TOKENS
    telemetry: TelemetryConfig = TelemetryConfig()
    evidence: EvidenceTable = EvidenceTable()


def proxy(
    coordinator: CoordinatorArgument = None,
    api_key_file: KeyFlag = None,
    trust_provider: ProviderFlag = None,
    trust_operator: OperatorFlag = None,
    allow_plain: PlainFlag = False,
    min_level: LevelFlag = None,
    port: PortFlag = 8770,
    config: ConfigFlag = None,
    traces: TracesFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Seal requests of tools, so that a coordinator cannot read them."""
    from convoy.api.listen.options import ServeOptions
    from convoy.fleet.proxy.proxy import ProxyOptions
    from convoy.fleet.proxy.server import run_proxy

    read = ProxyFile() if config is None else read_proxy_file(config)
    url, key = _coordinator(read, coordinator, api_key_file)
    read = override(read, evidence=override(read.evidence, min_level=min_level))
    trust = _trust(read, config, trust_provider or [], trust_operator or [])

    def ready(own_url: str) -> None:
        settle_memory()
        here.ready(f"seals requests at {own_url}/v1")
        facts = {"url": own_url, "coordinator": url, "trusts": len(trust.providers) + len(trust.operators)}
        if as_json:
            print_json_line({"event": "ready", **facts})
        else:
            print_fields(facts.items())

    folder = Path() if config is None else config.parent
    with (
        tracing(traces or read.telemetry.traces, "convoy-proxy") as on,
        announced("proxy", "proxy", folder) as here,
    ):
        plain, default = allow_plain or read.allow_plain, read.default_max_tokens
        options = ProxyOptions(trust, plain, default, traces=on)
        say = _no_words if as_json else print_draining
        cut_off = run_proxy(url, key, options, ServeOptions(port=port), on_ready=ready, on_drain=say)
    if not as_json:
        print_ended(cut_off)


def _coordinator(read: ProxyFile, url: str | None, key_file: Path | None) -> tuple[str, str]:
    """Return the coordinator's URL and the API key there. Raises `UsageError` if one is missing."""
    url = url or read.coordinator
    key = client_key(key_file or (None if read.api_key_file is None else Path(read.api_key_file)))
    if url is None or key is None:
        raise UsageError(
            "a coordinator and --api-key-file are needed",
            hint=f"as arguments, or in --config; the key may also be in {KEY_VARIABLE}",
        )
    return url, key


def _no_words(_num_answers: int, _drain_s: float) -> None:
    """Print nothing, because a script reads the output."""


def _trust(read: ProxyFile, file: Path | None, providers: list[str], operators: list[str]) -> Trust:
    """Return the trust of the file, and of the keys that flags add."""
    from convoy.fleet.proxy.trust import Trust

    operator_keys = read_keys("--trust-operator", [*read.trust_operators, *operators])
    provider_keys = read_keys("--trust-provider", [*read.trust_providers, *providers])
    return Trust(provider_keys, operator_keys, rules_of(read.evidence, file, operator_keys))


def read_keys(what: str, texts: list[str]) -> frozenset[bytes]:
    """Return Ed25519 public keys from hex. Raises `UsageError` for text that is no key."""
    keys = set()
    for text in texts:
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != 32:
            raise UsageError(
                f"{what}: {text[:80]!r} is no key, expected 64 hexadecimal digits",
                hint="a provider prints its key as it starts, `convoy identity show` that of this folder",
            )
        keys.add(key)
    return frozenset(keys)


def read_proxy_file(path: Path) -> ProxyFile:
    """Return the settings in a proxy.toml. Raises `ConfigError` naming the file and the key."""
    return read_toml(path, ProxyFile)
