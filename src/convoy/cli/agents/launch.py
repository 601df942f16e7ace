"""``convoy launch``: start an installed agent against a running cluster, with settings for that run only."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.agents.settings import AGENTS, NO_KEY, Agent, AgentServer, AgentSettings
from convoy.cli.running.endpoint import ApiKeyFlag, CaFlag, UrlFlag, client_key
from convoy.cli.show.output import JsonFlag, print_json, print_note
from convoy.errors import ConfigError, UsageError
from convoy.sdk.client import only_model
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint

# The first request of the smallest of the agents has about 6,000 tokens, and that of the largest 21,000.
_LEAST_CONTEXT = 16_384
_HIDDEN = "(the API key)"
_FOLDER = Path("FOLDER")
_END_S = 5.0
# Of the served models, an error names so many.
_MAX_NAMES = 8


def launch(
    agent: Annotated[str, typer.Argument(help=f"One of: {', '.join(AGENTS)}.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The agent's own arguments, behind --.")
    ] = None,
    url: UrlFlag = DEFAULT_URL,
    api_key_file: ApiKeyFlag = None,
    ca: CaFlag = None,
    model: Annotated[str | None, typer.Option(help="The model to use, if several are served.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--print", help="Show command and settings; start nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Start an installed agent on a running cluster."""
    row = AGENTS.get(agent)
    if row is None:
        raise UsageError(f"no agent {agent[:40]!r}, expected one of: {', '.join(AGENTS)}")
    if as_json and not dry_run:
        raise UsageError("--json needs --print", hint=f"convoy launch {row.name} --print --json")
    key = client_key(api_key_file)
    endpoint = Endpoint.of(url, key, ca)
    named = model or only_model(endpoint, "--model")
    _check_name(named)
    server = AgentServer(
        endpoint.url, named, _context_of(endpoint, named), key or NO_KEY, ca and ca.resolve()
    )
    if server.context is not None and server.context < _LEAST_CONTEXT:
        print_note(
            f"note: {named} takes {server.context} tokens a request; agents begin with 6,000 to 21,000"
        )
    if dry_run:
        _show(row, server, arguments or [], as_json=as_json)
        return
    program = shutil.which(row.program)
    if program is None:
        raise ConfigError(
            f"{row.name} is not installed: no program {row.program} on the PATH",
            hint=f"npm install -g {row.package}",
        )
    with _folder() as folder:
        code = _run(program, row.settings(server, folder), folder, arguments or [])
    raise typer.Exit(code)


def _check_name(model: str) -> None:
    """Raise `ConfigError` for a name that an agent's configuration may read as more than a name.

    opencode replaces ``{env:NAME}`` and ``{file:PATH}`` in its settings. A server chooses the name, and gets
    it back in every request.
    """
    if not model.isprintable() or set("{}") & set(model):
        raise ConfigError(
            f"the model's name is {model[:80]!r}, and agents take none with braces or unprintable characters",
            hint="serve the model under another name",
        )


def _context_of(endpoint: Endpoint, model: str) -> int | None:
    """Return the tokens that a request to ``model`` may use, or None if the server does not tell.

    Raises `UsageError` if the server does not list the model.
    """
    found = endpoint.get("/v1/models")
    listed = found.get("data") if isinstance(found, dict) else None
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    if all(card.get("id") != model for card in cards):
        names = ", ".join(name for card in cards[:_MAX_NAMES] if (name := str(card.get("id"))).isprintable())
        raise UsageError(
            f"the model {model!r} is not served at {endpoint.url}, expected one of: {names}",
            hint="--model names one",
        )
    for card in cards:
        if card.get("id") == model and isinstance(card.get("max_model_len"), int):
            return int(card["max_model_len"])
    return None


def _show(agent: Agent, server: AgentServer, arguments: list[str], *, as_json: bool) -> None:
    """Print the command and the settings, with the key's place in place of the key."""
    hidden = AgentServer(server.url, server.model, server.context, _HIDDEN, server.ca)
    settings = agent.settings(hidden, _FOLDER)
    command = [agent.program, *settings.arguments, *arguments]
    if as_json:
        print_json(
            {
                "command": command,
                "environment": settings.environment,
                "removed": list(settings.removed),
                "files": {f"{_FOLDER}/{name}": text for name, text in settings.files.items()},
            }
        )
        return
    print(shlex.join(command))
    for name, value in settings.environment.items():
        print(f"  {name}={value}")
    for name in settings.removed:
        print(f"  without {name}")
    for name, text in settings.files.items():
        print(f"  {_FOLDER}/{name}:")
        print("".join(f"    {line}\n" for line in text.splitlines()), end="")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    # `mkdtemp` makes a folder that other users cannot read: a file in it may hold the key.
    with tempfile.TemporaryDirectory(prefix="convoy-agent-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _run(program: str, settings: AgentSettings, folder: Path, arguments: list[str]) -> int:
    """Run the agent on this terminal and return its exit code, as a shell counts it.

    Ctrl-C belongs to the agent. If this process is told to end, the agent ends first.
    """
    for name, text in settings.files.items():
        (folder / name).write_text(text, "utf-8")
    with _no_interrupts():
        agent = subprocess.Popen(
            [program, *settings.arguments, *arguments], env=_environment(os.environ, settings)
        )
        try:
            code = agent.wait()
        finally:
            _end(agent)
    return 128 - code if code < 0 else code


def _environment(given: Mapping[str, str], settings: AgentSettings) -> dict[str, str]:
    kept = {name: value for name, value in given.items() if name not in settings.removed}
    return {**kept, **settings.environment}


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    # A handler, because the agent would inherit an ignored signal.
    before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(agent: subprocess.Popen[bytes]) -> None:
    if agent.poll() is not None:
        return
    agent.terminate()
    try:
        agent.wait(_END_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
