"""``convoy chat``: talk to a running head, once or line by line."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from convoy.cli.running.endpoint import ApiKeyFlag, CaFlag, UrlFlag, client_key
from convoy.cli.show.output import JsonFlag, one_line, print_json, print_note, styled
from convoy.cli.show.stall_notice import StallNotice
from convoy.errors import ConvoyError, UsageError
from convoy.sdk.client import list_models, only_model
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint

Message = dict[str, str]
_RECOVERING = "recovering: "
_LOOK_S = 2.0
_MAX_PROMPT_CHARS = 8 << 20
_COMMAND = re.compile(r"/[a-z]+", re.ASCII)
_HELP_COMMAND = "/help"
_QUOTES = '"""'
_COMMANDS = """/model NAME   ask another model; without a name: list them
/system TEXT  set the system message; without a text: have none
/new          begin a new conversation
Several lines: end each but the last with \\, or put them between two \"\"\" """.rstrip()
# Line end, tab, zero-width non-joiner and zero-width joiner.
_KEPT = frozenset("\n\t\u200c\u200d")


@dataclass
class ChatReply:
    """Hold a streamed answer. ``usage`` is the server's own count, or None if the server sent none."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, int] | None = None


def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="One question; - reads it from standard input. Without it: a conversation."),
    ] = None,
    url: UrlFlag = DEFAULT_URL,
    api_key_file: ApiKeyFlag = None,
    ca: CaFlag = None,
    model: Annotated[str | None, typer.Option(help="The model to ask, if the head serves several.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message for the start.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Talk to a running cluster; answers stream as they come."""
    if as_json and prompt is None:
        raise UsageError("--json needs a question", hint='convoy chat --json "What is 2+3?"')
    prompt = _read_prompt() if prompt == "-" else prompt
    endpoint = Endpoint.of(url, client_key(api_key_file), ca)
    model = model or only_model(endpoint, "--model")
    asked = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {name: value for name, value in asked.items() if value is not None}
    history = [] if system is None else [{"role": "system", "content": system}]
    if prompt is not None:
        _once(endpoint, [*history, _user(prompt)], options, as_json=as_json)
    else:
        _converse(endpoint, history, options)


def _read_prompt() -> str:
    """Return all of standard input, without its last line end. Raises `UsageError`."""
    if sys.stdin.isatty():
        print_note("type the question, then Ctrl-D:")
    try:
        text = sys.stdin.read(_MAX_PROMPT_CHARS + 1)
    except UnicodeDecodeError:
        raise UsageError("standard input is not UTF-8 text", hint="convert it to UTF-8") from None
    if len(text) > _MAX_PROMPT_CHARS:
        raise UsageError(
            f"standard input has more than {_MAX_PROMPT_CHARS} characters", hint="shorten the question"
        )
    if not text.strip():
        raise UsageError("standard input has no question", hint="echo 'What is 2+3?' | convoy chat -")
    return text.removesuffix("\n")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _once(endpoint: Endpoint, messages: list[Message], options: dict[str, Any], *, as_json: bool) -> None:
    if not as_json:
        _show(endpoint, messages, options)
        return
    started = time.monotonic()
    answer = ChatReply()
    for _ in _stream(endpoint, messages, options, answer):
        pass
    seconds = time.monotonic() - started
    print_json(
        {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "usage": answer.usage,
            "total_s": round(seconds, 4),
        }
    )


def _converse(endpoint: Endpoint, history: list[Message], options: dict[str, Any]) -> None:
    """Ask and answer until the input ends. Report a failed turn, leave it out, and continue."""
    if sys.stdin.isatty():
        print_note(f"end with Ctrl-D; Ctrl-C stops an answer; {_HELP_COMMAND} lists the commands")
    # Here each Ctrl-C stops one answer. The command's own handler would end the process at the second.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while (line := _ask()) is not None:
        if not line.strip():
            continue
        try:
            if _obeyed(line, endpoint, history, options):
                continue
            _turn(endpoint, line, history, options)
        except KeyboardInterrupt:
            print_note("\nstopped")
        except ConvoyError as error:
            print_note(f"{styled('error:', 'red', sys.stderr)} {one_line(error.message)}")


def _turn(endpoint: Endpoint, line: str, history: list[Message], options: dict[str, Any]) -> None:
    """Answer one question. Only a complete turn enters the history."""
    messages = [*history, _user(line)]
    text = _show(endpoint, messages, options)
    history[:] = [*messages, {"role": "assistant", "content": text}]


def _obeyed(line: str, endpoint: Endpoint, history: list[Message], options: dict[str, Any]) -> bool:
    """Do what a line such as ``/model NAME`` says. Return False for a line that is a question."""
    word, _, rest = line.strip().partition(" ")
    if _COMMAND.fullmatch(word) is None:
        return False
    rest = rest.strip()
    if word == "/model":
        _choose_model(rest, endpoint, options)
    elif word == "/system":
        history[:] = [*([{"role": "system", "content": rest}] if rest else []), *_without_system(history)]
        print_note("the system message counts from the next question" if rest else "no system message now")
    elif word == "/new":
        history[:] = [one for one in history if one["role"] == "system"]
        print_note("a new conversation begins")
    else:
        if word != _HELP_COMMAND:
            print_note(f"there is no command {word}")
        print_note(_COMMANDS)
    return True


def _without_system(history: list[Message]) -> list[Message]:
    return [one for one in history if one["role"] != "system"]


def _choose_model(named: str, endpoint: Endpoint, options: dict[str, Any]) -> None:
    """Ask another model from now on, or list them. The conversation stays."""
    names = list_models(endpoint)
    if named in names:
        options["model"] = named
        print_note(f"{one_line(named)} answers from now on")
        return
    if named:
        print_note(f"{one_line(named)} is not served here")
    print_note("\n".join(f"{'*' if name == options['model'] else ' '} {one_line(name)}" for name in names))


def _ask() -> str | None:
    """Return the next question, or None at the end of the input.

    A line that ends with a backslash goes on in the next one. So do lines after one that begins with three
    quotation marks, until a line ends with them.
    """
    line = _line("> ")
    if line is None:
        return None
    if line.lstrip().startswith(_QUOTES):
        return _quoted(line.lstrip().removeprefix(_QUOTES))
    while line.endswith("\\"):
        more = _line(". ")
        line = f"{line[:-1]}\n{more or ''}"
    return line


def _quoted(text: str) -> str:
    """Return a question of several lines, which begins with ``text``."""
    while not text.rstrip().endswith(_QUOTES):
        more = _line(". ")
        if more is None:
            return text
        text = f"{text}\n{more}"
    return text.rstrip().removesuffix(_QUOTES).strip("\n")


def _line(sign: str) -> str | None:
    """Return a line of the input, or None at its end.

    On a terminal, earlier lines come back with the arrow keys. They are kept in memory alone.
    """
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                # The import gives `input` its editor and its history.
                import readline  # noqa: F401
            return input(sign)
        # The prompt sign goes to standard error: a person sees it there, and piped answers stay clean.
        if sys.stdin.isatty():
            print(styled(sign, "bold", sys.stderr), end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise UsageError(
            "standard input is not UTF-8 text", hint="convert it to UTF-8, or give the prompt as an argument"
        ) from None
    return line.rstrip("\n") if line else None


def _show(endpoint: Endpoint, messages: list[Message], options: dict[str, Any]) -> str:
    """Print an answer as it comes, and return it. Note a pause for a recovery on a line of its own."""
    answer = ChatReply()

    def tell(reason: str) -> None:
        begins_line = not answer.text or answer.text.endswith("\n")
        print_note(f"{'' if begins_line else chr(10)}(the cluster is recovering: {one_line(reason)})")

    try:
        with StallNotice(lambda: _recovering(endpoint), tell) as notice:
            for piece in _stream(endpoint, messages, options, answer, notice.came):
                print(printable(piece), end="", flush=True)
    except ConvoyError:
        if answer.text:
            # The error must begin on a line of its own.
            print()
        raise
    print()
    return answer.text


def printable(text: str) -> str:
    """Return ``text`` without control characters, which could draw on a terminal or forge what it shows.

    Line ends and tabs stay. So do the joiners that emoji and some scripts are written with.
    """
    return "".join(
        char for char in text if char in _KEPT or unicodedata.category(char) not in {"Cc", "Cf", "Cs"}
    )


def _recovering(endpoint: Endpoint) -> str | None:
    """Return the reason that a recovering cluster gives, or None.

    A server that does not answer here is no news: the answer then ends by itself.
    """
    try:
        health = replace(endpoint, timeout_s=_LOOK_S).get("/health", accept=frozenset({200, 503}))
    except ConvoyError:
        return None
    reason = health.get("reason") if isinstance(health, dict) else None
    if not isinstance(reason, str) or not reason.startswith(_RECOVERING):
        return None
    return reason.removeprefix(_RECOVERING)


def _stream(
    endpoint: Endpoint,
    messages: list[Message],
    options: dict[str, Any],
    answer: ChatReply,
    came: Callable[[], None] = lambda: None,
) -> Iterator[str]:
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
    for event in endpoint.stream("/v1/chat/completions", body):
        came()
        if event.get("usage") is not None:
            answer.usage = event["usage"]  # type: ignore[assignment]
        for choice in event.get("choices") or ():  # type: ignore[attr-defined]
            piece = choice["delta"].get("content") or ""
            answer.text += piece
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if piece:
                yield piece
