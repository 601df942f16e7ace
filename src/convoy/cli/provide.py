"""``convoy provide``: answer a coordinator's requests with an engine that has OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.flags.traces import TracesFlag, tracing
from convoy.cli.operator.home import DEFAULT_HOME, DirectoryFlag, Home
from convoy.cli.running.endpoint import client_key
from convoy.cli.running.process import announced
from convoy.cli.running.provide import (
    CertificateFlag,
    CoordinatorKeyFlag,
    provider_identity,
    read_coordinator_key,
)
from convoy.cli.show.output import JsonFlag, print_json_line, print_note
from convoy.config.clear_text import check_sealed
from convoy.sdk.endpoint import DEFAULT_URL

if TYPE_CHECKING:
    from convoy.fleet.capacity import Capacity

CoordinatorArgument = Annotated[str, typer.Argument(help="wss://HOST[:PORT]; ws:// only to this machine.")]
UpstreamFlag = Annotated[
    str, typer.Option(help="The engine's URL: `convoy serve`, vLLM, llama.cpp or Ollama.")
]
UpstreamKeyFlag = Annotated[Path | None, typer.Option(help="File with the engine's API key.")]
ModelFlag = Annotated[
    list[str] | None, typer.Option(help="Offer this model of the engine; repeatable.  [default: all]")
]
SharedCacheFlag = Annotated[
    bool,
    typer.Option(help="Let the engine share prompt prefixes between accounts: send no cache_salt."),
]
SlotsFlag = Annotated[int, typer.Option(min=1, max=4096, help="Concurrent requests for each model.")]


def provide(
    coordinator: CoordinatorArgument,
    upstream: UpstreamFlag = DEFAULT_URL,
    upstream_key_file: UpstreamKeyFlag = None,
    model: ModelFlag = None,
    slots: SlotsFlag = 8,
    shared_cache: SharedCacheFlag = False,
    coordinator_key: CoordinatorKeyFlag = None,
    certificate: CertificateFlag = None,
    traces: TracesFlag = None,
    directory: DirectoryFlag = DEFAULT_HOME,
    as_json: JsonFlag = False,
) -> None:
    """Register with a coordinator, and answer its requests."""
    from convoy.cluster.head.provider_evidence import OwnProcess
    from convoy.fleet.provider.provide import ProvideOptions, state_of
    from convoy.fleet.provider.run import provide_until_drained
    from convoy.fleet.provider.upstream import Upstream, checked_base

    # Nothing is made, dialled or measured before every flag has been checked.
    ProvideOptions(coordinator, {}).check()
    key = read_coordinator_key(coordinator_key)
    checked_base(upstream)
    engine_key = None if upstream_key_file is None else client_key(upstream_key_file)
    if engine_key is not None:
        check_sealed(upstream, "send a key to")

    def say(kind: str, text: str) -> None:
        print_json_line({"event": kind, "text": text}) if as_json else print_note(text)
        # Reports copy the state: no text. A provider is ready once it dials; approval may take days.
        if kind == "coordinator":
            here.ready(state_of(text))
        elif kind == "measuring":
            here.say(kind)

    def options(offers: dict[str, Capacity]) -> ProvideOptions:
        return ProvideOptions(
            *(coordinator, offers),
            coordinator_key=key,
            certificate=certified,
            events=lambda text: say("coordinator", text),
            traces=on,
            shares_cache=shared_cache,
            evidence_source=OwnProcess(identity),
        )

    with tracing(traces, "convoy-provider") as on, announced("provide", "provide", directory) as here:
        identity, certified = provider_identity(Home(directory), certificate)
        say("key", f"this provider's key is {identity.public_key.hex()}")
        engine = Upstream(upstream, engine_key)
        provide_until_drained(identity, engine, options, models=model, slots=slots, say=say)
