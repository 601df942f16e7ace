"""Render a model's chat template in a process of its own, which `templates` starts.

A template comes with a model, so it must not be trusted with time or memory. This process imports neither
torch nor transformers and limits its own memory and processor time. Its parent kills it if it takes too long.
It ends when its standard input ends, and therefore with its parent.

Frames on both pipes are four bytes of length, big-endian, and that many bytes. Input frames are JSON: the
first holds the template, its variables and the limits, and each further one the variables of one rendering.
Output frames are one byte of status and UTF-8 text: one for each input frame.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import struct
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.sandbox

DONE, REFUSED, FAILED, TOO_LONG, NO_MEMORY = range(5)
LENGTH = struct.Struct(">I")
# Processor time beyond the parent's own limit: this one acts only if the parent was killed meanwhile.
_SPARE_CPU_S = 2
_MAX_REASON = 200
_INPUT, _OUTPUT, _ERRORS = range(3)


def main() -> None:
    """Render until standard input ends."""
    frames = os.fdopen(os.dup(_INPUT), "rb")
    answers = os.fdopen(os.dup(_OUTPUT), "wb")
    # Send everything that a library prints to standard error, so that it cannot corrupt the frames.
    os.dup2(_ERRORS, _OUTPUT)
    first = _read(frames)
    if first is None:
        return
    opening = json.loads(first)
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_FSIZE", 0)
    _limit("RLIMIT_AS", opening["max_memory_bytes"])
    renderer = Renderer(opening["template"], opening["variables"], opening["max_output_bytes"])
    _write(answers, DONE, "")
    while (frame := _read(frames)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit("RLIMIT_CPU", int(used.ru_utime + used.ru_stime + opening["seconds"]) + _SPARE_CPU_S)
        _write(answers, *renderer.render(frame))


class Renderer:
    """Render one template, compiled at its first use."""

    def __init__(self, template: str, variables: dict[str, Any], max_output_bytes: int) -> None:
        self._source = template
        self._variables = variables
        self._max_bytes = max_output_bytes
        self._template: jinja2.Template | None = None

    def render(self, frame: bytes) -> tuple[int, str]:
        """Return a status and its text."""
        try:
            text = self._text(json.loads(frame.decode("utf-8", "surrogatepass")))
        except jinja2.exceptions.TemplateError as error:
            lines = (error.message or "no reason given").splitlines() or [""]
            return REFUSED, lines[0][:_MAX_REASON]
        except MemoryError:
            return NO_MEMORY, ""
        except Exception as error:  # noqa: BLE001 - a template may raise anything at all
            return FAILED, type(error).__name__
        return (TOO_LONG, "") if text is None else (DONE, text)

    def _text(self, given: dict[str, Any]) -> str | None:
        """Return the rendered text, or None if it is too long. The template's own variables come first."""
        if self._template is None:
            self._template = environment().from_string(self._source)
        usual = {"tools": None, "documents": None, "add_generation_prompt": True}
        pieces, size = [], 0
        for piece in self._template.generate(**{**usual, **given, **self._variables}):
            pieces.append(piece)
            size += len(piece)
            if size > self._max_bytes:
                return None
        text = "".join(pieces)
        return text if len(text.encode("utf-8", "surrogatepass")) <= self._max_bytes else None


def environment() -> jinja2.Environment:
    """Return the sandbox in which `transformers` renders chat templates, name for name."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["dict"] = _Dict()
    made.globals["namespace"] = _Namespace
    return made


class _Generation(jinja2.ext.Extension):
    """Accept ``{% generation %}``, which marks the assistant's text for training, and show its contents."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """Provide ``dict`` without its attributes, which lead out of the sandbox."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> Any:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Provide ``namespace`` without names that begin with an underscore."""

    def __init__(*args: Any, **named: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _limit(name: str, value: int) -> None:
    # Not every system has every limit.
    with contextlib.suppress(AttributeError, ValueError, OSError):
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _read(source: BinaryIO) -> bytes | None:
    """Return the next frame, or None at the end."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    frame = source.read(size)
    return frame if len(frame) == size else None


def _write(answers: BinaryIO, status: int, text: str) -> None:
    data = bytes([status]) + text.encode("utf-8", "surrogatepass")
    answers.write(LENGTH.pack(len(data)) + data)
    answers.flush()


if __name__ == "__main__":
    main()
