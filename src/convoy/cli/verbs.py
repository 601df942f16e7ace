"""The verbs of `convoy`: one row each. A verb's module is imported only if the verb is used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from convoy.cli.show.help import PROVE, RUN, SET_UP, SHARE, GroupedCommand


@dataclass(frozen=True, slots=True)
class Verb:
    """Hold a row of the table: the verb's name, its group on the help page, and its line there.

    ``target`` is "module:name" in this package; the name is a function or a `typer.Typer`.
    """

    name: str
    target: str
    panel: str
    line: str
    cls: type[TyperCommand] = TyperCommand

    def load(self) -> Any:
        """Import the verb's module and return its command."""
        module, _, name = self.target.partition(":")
        target = getattr(importlib.import_module(f"convoy.cli.{module}"), name)
        if isinstance(target, typer.Typer):
            command = typer.main.get_group(target)
            command.name = self.name
            return command
        app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
        app.command(self.name, cls=self.cls)(target)
        return typer.main.get_command(app)


VERBS = (
    Verb("demo", "demo:demo", RUN, "Split the bundled model over two sealed processes and ask it."),
    Verb("run", "run:run", RUN, "Split a model over processes here, to serve it or answer.", GroupedCommand),
    Verb("serve", "serve:serve", RUN, "Run the head: split a model, answer the OpenAI API.", GroupedCommand),
    Verb(
        *("join", "join:join", RUN, "Hold layers for a head: run it on each further machine."),
        GroupedCommand,
    ),
    Verb("chat", "chat:chat", RUN, "Talk to a running cluster; answers stream as they come."),
    Verb("launch", "agents.launch:launch", RUN, "Start an installed agent on a running cluster."),
    Verb("session", "session:session", RUN, "Answer a prompt, and keep the conversation in a file."),
    Verb("status", "status:status", RUN, "Show a running cluster: stages, links, load."),
    Verb("top", "top:top", RUN, "Watch a running cluster in the terminal: members, links, load."),
    Verb("open", "open:open_page", RUN, "Show an address that signs a browser in to the page."),
    Verb("invite", "invite:invite", SET_UP, "Let one more machine in: show a token for its `join`."),
    Verb("plan", "plan:plan", SET_UP, "Show which member would hold which layers, how fast, and why."),
    Verb("doctor", "doctor:doctor", SET_UP, "Check this machine, its keys, the roster and every peer."),
    Verb(
        *("models", "model_files.models:models", SET_UP),
        "List the models kept here and good choices; say which fit.",
    ),
    Verb("pull", "model_files.pull:pull", SET_UP, "Download models of a hub, before they are served."),
    Verb("rm", "model_files.rm:rm", SET_UP, "Remove models that this machine keeps."),
    Verb(
        *("service", "machine.service:app", SET_UP),
        "Run a member as a service that survives a reboot.",
    ),
    Verb("ps", "machine.processes:ps", SET_UP, "List the processes of Convoy on this machine."),
    Verb("stop", "machine.processes:stop", SET_UP, "Stop a process of Convoy on this machine, in order."),
    Verb("logs", "machine.processes:logs", SET_UP, "Show the log of a service on this machine."),
    Verb("upgrade", "machine.versions:upgrade", SET_UP, "Compare the versions of a cluster's members."),
    Verb(
        *("report", "machine.report:report", SET_UP),
        "Write a file for a bug report, without keys, prompts or addresses.",
    ),
    Verb("identity", "identity:app", SET_UP, "Make or show keys and cards; an operator key's passphrase."),
    Verb("roster", "roster:app", SET_UP, "Sign, change, show or verify the list of members."),
    Verb("keys", "keys:app", SET_UP, "Make and list files with API keys."),
    Verb(
        *("manifest", "model_files.manifest:app", SET_UP),
        "Show, sign or verify the hashes of a model's tensors.",
    ),
    Verb(
        *("quantize", "model_files.quantize:quantize", SET_UP),
        "Write a checkpoint with 4-bit or 8-bit weights.",
    ),
    Verb("attest", "attest:app", SET_UP, "Show this machine's evidence; enrol its TPM."),
    Verb("audit", "audit:app", SET_UP, "Show or verify the log of a key's acts."),
    Verb("provide", "provide:provide", SHARE, "Register with a coordinator, and answer its requests."),
    Verb("proxy", "proxy:proxy", SHARE, "Seal requests of tools, so that a coordinator cannot read them."),
    Verb(
        *("coordinator", "coordinator:app", SHARE),
        "Route requests of accounts to providers; administer both.",
    ),
    Verb("eval", "eval:evaluate", PROVE, "Score a model on questions with one right answer each."),
    Verb(
        *("verify", "verify:verify", PROVE),
        "Prove that a model answers the same whole and split.",
    ),
    Verb("bench", "bench:app", PROVE, "Measure sealing, and the speed of one and of two members."),
)


class VerbCommands(MutableMapping[str, Any]):
    """Map the names of verbs to their commands. Only reading a command imports its module."""

    def __init__(self, registered: Mapping[str, Any]) -> None:
        """Begin with the commands that were ``registered`` in code, which stand before the table's."""
        self._verbs = {verb.name: verb for verb in VERBS}
        self._loaded: dict[str, Any] = dict(registered)

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._verbs[name].load()
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._verbs

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._verbs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._verbs)

    def __len__(self) -> int:
        return len(self._verbs)


class VerbGroup(TyperGroup):
    """List the verbs in groups, from the table alone, without the options that every verb has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = VerbCommands(self.commands)

    # The base class's signature has the parameter `ctx`.
    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        # Without the usual empty line before it: the list of verbs fills a screen.
        with formatter.indentation():
            formatter.write_text(self.help)

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        width = max(len(verb.name) for verb in VERBS)
        for panel in (RUN, SET_UP, SHARE, PROVE):
            with formatter.section(panel):
                formatter.write_dl([(v.name.ljust(width), v.line) for v in VERBS if v.panel == panel])
