"""``convoy chat``: talk to a running head, once or line by line."""

from __future__ import annotations

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
from convoy.sdk.client import only_model
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint

Message = dict[str, str]
_RECOVERING = "recovering: "
_LOOK_S = 2.0
_MAX_PROMPT_CHARS = 8 << 20
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
    started = time.monotonic()
    answer = ChatReply()
    if as_json:
        for _ in _stream(endpoint, messages, options, answer):
            pass
    else:
        try:
            _show(endpoint, messages, options, answer)
        except ConvoyError:
            if answer.text:
                # The error must begin on a line of its own.
                print()
            raise
    if as_json:
        seconds = time.monotonic() - started
        print_json(
            {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "usage": answer.usage,
                "total_s": round(seconds, 4),
            }
        )
    else:
        print()


def _converse(endpoint: Endpoint, history: list[Message], options: dict[str, Any]) -> None:
    """Ask and answer until the input ends. Report a failed turn, leave it out, and continue."""
    if sys.stdin.isatty():
        print_note("end with Ctrl-D; Ctrl-C stops an answer")
    # Here each Ctrl-C stops one answer. The command's own handler would end the process at the second.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while (line := _ask()) is not None:
        if not line.strip():
            continue
        messages = [*history, _user(line)]
        answer = ChatReply()
        try:
            _show(endpoint, messages, options, answer)
        except KeyboardInterrupt:
            print_note("\nstopped")
            continue
        except ConvoyError as error:
            if answer.text:
                print()
            print_note(f"{styled('error:', 'red', sys.stderr)} {one_line(error.message)}")
            continue
        print()
        # Only a complete turn enters the history.
        history = [*messages, {"role": "assistant", "content": answer.text}]


def _ask() -> str | None:
    # The prompt sign goes to standard error: a person sees it there, and piped answers stay clean.
    try:
        if sys.stdin.isatty():
            print(styled("> ", "bold", sys.stderr), end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        raise UsageError(
            "standard input is not UTF-8 text", hint="convert it to UTF-8, or give the prompt as an argument"
        ) from None
    return line.rstrip("\n") if line else None


def _show(endpoint: Endpoint, messages: list[Message], options: dict[str, Any], answer: ChatReply) -> None:
    """Print an answer as it comes. Note a pause for a recovery on a line of its own."""

    def tell(reason: str) -> None:
        begins_line = not answer.text or answer.text.endswith("\n")
        print_note(f"{'' if begins_line else chr(10)}(the cluster is recovering: {one_line(reason)})")

    with StallNotice(lambda: _recovering(endpoint), tell) as notice:
        for piece in _stream(endpoint, messages, options, answer, notice.came):
            print(printable(piece), end="", flush=True)


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
