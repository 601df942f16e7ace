"""The command ``convoy``: its options, its exit code, and the report of its errors.

Each verb is a file beside this one, imported only if it is used; `cli.verbs` lists them.
"""

from __future__ import annotations

import contextlib
import difflib
import faulthandler
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from convoy import __version__
from convoy.api.ending import arm_at_second, end_within, run_handlers_soon
from convoy.cli.running.start import (
    ask_for_huge_pages,
    leave_interpreter,
    switch_threads_soon,
    wait_briefly_for_threads,
)
from convoy.cli.show.exit_codes import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, exit_code
from convoy.cli.show.logs import FormatFlag, LevelFlag, set_up_logs
from convoy.cli.show.output import one_line, print_json, report_convoy_error, report_error
from convoy.cli.verbs import VerbGroup
from convoy.errors import ConvoyError, UsageError
from convoy.transport.listen.descriptors import raise_descriptor_limit

# Module -> the extra of the package that brings it.
_EXTRAS = {
    "alembic": "fleet",
    "sqlalchemy": "fleet",
    "websockets": "fleet",
    "gguf": "gguf",
    "opentelemetry": "telemetry",
    "psycopg": "postgres",
    "zeroconf": "discovery",
}
# The option parser's words for a value, with a reason that may follow, and ours.
_BAD_VALUE = re.compile(r"Input should be (.+? to(?= )|.+?)((?: -?[\d.]+)?)(?:, unable to .+)?$")
_BAD_CHOICE = re.compile(r"Value error, '.*' is not one of (.+)$")
# The option parser's words for a verb without its model.
_NO_MODEL = "Missing argument 'model'"
# The option parser's suggestion of verbs, the nearest first.
_SUGGESTED = re.compile(r"\. Did you mean '([^']+)'.*\?$")
_KINDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "less than or equal to": "at most",
    "greater than or equal to": "at least",
}
# A longer value may be a prompt or a key that took the place of a number, and is not repeated.
_MAX_SHOWN_CHARS = 20
# How much of two options' letters must agree, from 0 to 1.
_NEAR = 0.8

app = typer.Typer(
    name="convoy",
    cls=VerbGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


@app.callback(invoke_without_command=True)
def convoy(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", hidden=True)] = False,
    # `_debug_wanted` reads this flag from the command line.
    debug: Annotated[bool, typer.Option("--debug", hidden=True)] = False,  # noqa: ARG001
    log_level: LevelFlag = "warning",
    log_format: FormatFlag = "text",
) -> None:
    """Run one model across several machines, over links that are always sealed."""
    if (log_level, log_format) != ("warning", "text"):
        set_up_logs(log_level, log_format)
    if version:
        print(f"convoy {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        from convoy.cli.machine.overview import print_overview

        print_overview()


def main(arguments: Sequence[str] | None = None, commands: typer.Typer | None = None) -> None:
    """Run the console script, or one with other ``commands``.

    Exit with 0, with 130 when interrupted, or with a code of `exit_codes`.
    """
    set_up_logs()
    end = leave_interpreter()
    # A crash in native code then names the functions that ran. It shows none of their data.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        # Without an open stderr there is no place to say so.
        faulthandler.enable()
    # torch reads the environment when it is imported, so these calls come first.
    ask_for_huge_pages()
    wait_briefly_for_threads()
    switch_threads_soon()
    raise_descriptor_limit()
    # A signal becomes an exception, so that a terminated command leaves its `with` blocks. They end its
    # processes and remove its files.
    stopped = _terminator()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stopped)
    run_handlers_soon()
    code = run(list(sys.argv[1:] if arguments is None else arguments), commands)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # The process ends anyway: a signal must not interrupt its end.
        signal.signal(number, signal.SIG_IGN)
    # Ends the process even if one of its threads never ends.
    end_within()
    end(code)


def run(arguments: list[str], commands: typer.Typer | None = None) -> int:
    """Run one command line and return its exit code; every error has been reported by then.

    ``commands`` are those of a script of its own, in place of all of `convoy`.
    """
    # Words after -- are arguments, even if they look like options.
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in options
    try:
        code = (commands or app)(args=arguments, prog_name="convoy", standalone_mode=False)
        # A reader that has gone must show here, where the error is handled, and not at exit.
        sys.stdout.flush()
        # Typer returns this code for Ctrl-C.
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _nobody_reads()
    except (KeyboardInterrupt, typer.Abort):
        # After Ctrl-C a person needs no error message, but a script needs its one JSON value.
        if as_json:
            print_json({"error": {"type": "Interrupted", "message": "interrupted", "hint": None}})
        return EXIT_INTERRUPTED
    # This is the last place that can report an error.
    except Exception as error:  # noqa: BLE001
        if _debug_wanted(options):
            traceback.print_exc()
        # The report itself may also meet a closed pipe.
        with contextlib.suppress(BrokenPipeError):
            return _report(error, options, as_json)
        return _nobody_reads()


def _nobody_reads() -> int:
    """Send the rest of the output to the null device and return EXIT_FAILURE: the reader of our output has
    gone.

    Without this, the flush at exit would fail once more.
    """
    # Replace the descriptor, because Python flushes its buffer into it at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_FAILURE


def _terminator() -> Callable[[int, FrameType | None], None]:
    """Return a signal handler that interrupts the command.

    From the second signal on, the command has seconds to end.
    """
    arm = arm_at_second()

    def terminated(_number: int, _frame: FrameType | None) -> None:
        arm()
        raise KeyboardInterrupt

    return terminated


def _debug_wanted(options: list[str]) -> bool:
    # --debug stands before the verb. After the verb, the word may be an argument of the verb.
    return "--debug" in options[:2]


def _report(error: Exception, options: list[str], as_json: bool) -> int:
    if isinstance(error, ConvoyError):
        if isinstance(error, UsageError) and error.hint is None:
            error.hint = f"see `{_command_at(options)} --help`"
        report_convoy_error(error, as_json=as_json)
        return exit_code(error)
    if isinstance(error, TyperException):
        message, hint = _usage_error(error, options)
        # The option parser refuses an unknown verb before it reads the options ahead of it.
        if re.match(r"(?:--debug |--log-level[ =]\w+ )*--log-format[ =]json ", " ".join(options)):
            set_up_logs(form="json")
        report_error("UsageError", message, hint, as_json=as_json)
        return EXIT_USAGE
    if isinstance(error, ModuleNotFoundError) and error.name:
        report_error(
            "ModuleMissing",
            f"the Python module {one_line(error.name)} is not installed",
            _remedy(error.name),
            as_json=as_json,
        )
        return EXIT_FAILURE
    report_error(
        "InternalError",
        f"internal error: {type(error).__name__}",
        "this is a fault of Convoy: run `convoy --debug ...` for the traceback, and report it",
        as_json=as_json,
    )
    return EXIT_FAILURE


def _remedy(module: str) -> str:
    """Return how to install a module that is missing."""
    extra = _EXTRAS.get(module.partition(".")[0])
    if extra is None:
        return "install Convoy with what it needs: `make setup` in a clone, or its wheel again"
    return f"install Convoy with its extra {extra}: pip install 'WHEEL[{extra}]'"


def _usage_error(error: TyperException, options: list[str]) -> tuple[str, str]:
    """Return the message and the hint for a Typer error.

    The message follows our grammar: lower case, no full stop. The hint names the help page of the verb.
    """
    asked = getattr(error, "option_name", None)
    near: list[str] = []
    if asked is not None and getattr(error, "possibilities", None):
        near = _near(asked, error.possibilities)  # type: ignore[attr-defined]
        error.possibilities = None  # type: ignore[attr-defined]
    text = _expected(error.format_message().rstrip("."))
    verb = _SUGGESTED.search(text)
    if verb is not None:
        text, near = text[: verb.start()], [verb[1]]
    text = text.replace("Invalid value for", f"Invalid value{_wrong_value(error)} for", 1)
    context = getattr(error, "ctx", None)
    command = _command_at(options) if context is None else context.command_path
    if (
        # Verbs that take --url have no port option: the URL holds the port.
        asked == "--port"
        and context is not None
        and any("--url" in one.opts for one in context.command.params)
    ):
        return text[:1].lower() + text[1:], "a server is named by its URL: --url http://127.0.0.1:PORT"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif text == _NO_MODEL:
        from convoy.config.table import MODEL_HINT

        hint = f"{MODEL_HINT}: {command} demo"
    else:
        hint = f"see `{command} --help`"
    return text[:1].lower() + text[1:], hint


def _expected(text: str) -> str:
    """Return a message about a value with our words in place of the option parser's."""
    text = _BAD_CHOICE.sub(lambda found: f"expected {found[1].replace(chr(39), '')}", text)
    return _BAD_VALUE.sub(lambda found: f"expected {_KINDS.get(found[1], found[1])}{found[2]}", text)


def _wrong_value(error: TyperException) -> str:
    """Return the value that an option or argument refused, behind a space, or "" if it is not for showing."""
    details = getattr(error.__cause__, "errors", None)
    value = "" if details is None else str(details()[0]["input"])
    return f" {value!r}" if 0 < len(value) <= _MAX_SHOWN_CHARS and not re.search(r"\s", value) else ""


def _near(asked: str, options: Sequence[str]) -> list[str]:
    """Return the options that differ from ``asked`` by a typing error, or that ``asked`` begins."""
    alike = difflib.get_close_matches(asked, options, cutoff=_NEAR)
    return [one for one in options if one in alike or (len(asked) > 3 and one.startswith(asked))]


def _command_at(options: list[str]) -> str:
    """Return the command that ``options`` name.

    Typer gives no context with an error about an option's number of values.
    """
    names, at = ["convoy"], typer.main.get_command(app)
    for word in options:
        if not isinstance(at, TyperGroup):
            break
        if word in at.commands:
            names, at = [*names, word], at.commands[word]
    return " ".join(names)
