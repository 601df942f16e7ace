"""Record a command in a terminal and write it as an animated SVG, without fonts or scripts from elsewhere.

    python scripts/record_terminal.py docs/pictures/demo.svg -- convoy demo

The command really runs, in a pseudo-terminal of ``--columns`` columns. Its lines appear in the picture as
they came, with long pauses cut. Where nothing is animated, all lines show at once.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
ROWS = 50
# Sizes in pixels of the picture.
LINE, LETTER, MARGIN, BAR = 19, 8.2, 18, 34
MAX_PAUSE_S = 1.2
TYPING_S = 0.05

STYLE = """\
    .screen { fill: #0d1117; stroke: #30363d; }
    .button { fill: #484f58; }
    text { font: 13.5px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
    text { fill: #e6edf3; white-space: pre; }
    .typed { fill: #7ee787; font-weight: 600; }
    @media (prefers-color-scheme: light) {
      .screen { fill: #ffffff; stroke: #d0d7de; }
      .button { fill: #d0d7de; }
      text { fill: #1f2328; }
      .typed { fill: #116329; }
    }
    @media (prefers-reduced-motion: no-preference) {
      .line { animation: appear 0.01s both; }
    }
    @keyframes appear { from { opacity: 0; } to { opacity: 1; } }
"""


def record(command: Sequence[str], columns: int) -> tuple[list[tuple[float, str]], int]:
    """Run ``command`` in a terminal; return its lines, each with its time in seconds, and its exit code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    # A dumb terminal gets no progress bars, which move the cursor.
    environment = os.environ | {"TERM": "dumb", "COLUMNS": str(columns)}
    began = time.monotonic()
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        lines, rest = [], b""
        while piece := _read(master):
            *ended, rest = (rest + piece).split(b"\n")
            lines += [(time.monotonic() - began, _clean(line)) for line in ended]
        os.close(master)
    if rest:
        lines.append((time.monotonic() - began, _clean(rest)))
    return lines, process.returncode


def _read(terminal: int) -> bytes:
    """Return what the terminal has next, or nothing at its end, which Linux reports as an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def _clean(line: bytes) -> str:
    """Return the text of a line without control sequences, as it stands after the last carriage return."""
    text = CONTROL.sub("", line.decode("utf-8", "replace")).rstrip("\r")
    return text.rpartition("\r")[2].expandtabs().rstrip()


def wrap(lines: Sequence[tuple[float, str]], columns: int) -> list[tuple[float, str]]:
    """Return the lines as a terminal folds them."""
    starts = range(0, 1_000_000, columns)
    return [
        (at, text[start : start + columns])
        for at, text in lines
        for start in starts
        if start == 0 or start < len(text)
    ]


def shorten_pauses(times: Sequence[float]) -> list[float]:
    """Return ``times`` in seconds with each pause cut to ``MAX_PAUSE_S``."""
    shown, last, now = [], 0.0, 0.0
    for at in times:
        now += min(at - last, MAX_PAUSE_S)
        last = at
        shown.append(now)
    return shown


def write_svg(command: str, lines: Sequence[tuple[float, str]], columns: int) -> str:
    """Return the picture of a terminal in which ``command`` was typed and wrote ``lines``."""
    width = round(2 * MARGIN + columns * LETTER)
    height = BAR + 2 * MARGIN + LINE * len(lines)
    typed_s = TYPING_S * len(command)
    rows = [f'  <text class="typed" x="{MARGIN}" y="{BAR + MARGIN}">$ {escape(command)}</text>']
    for number, (at, (_, text)) in enumerate(
        zip(shorten_pauses([at for at, _ in lines]), lines, strict=True), 1
    ):
        if text:
            y = BAR + MARGIN + LINE * number
            delay = f'style="animation-delay: {typed_s + at:.2f}s"'
            rows.append(f'  <text class="line" x="{MARGIN}" y="{y}" {delay}>{escape(text)}</text>')
    buttons = "".join(f'<circle class="button" cx="{x}" cy="20" r="6"/>' for x in (24, 44, 64))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"',
            '    xml:space="preserve">',
            f"  <title>A terminal: {escape(command)}</title>",
            f"  <style>\n{STYLE}  </style>",
            f'  <rect class="screen" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>',
            f"  {buttons}",
            *rows,
            "</svg>\n",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Record a command in a terminal as an SVG.")
    parser.add_argument("file", type=Path, help="where to write the picture")
    parser.add_argument("command", nargs="+", help="the command, after --")
    parser.add_argument("--columns", type=int, default=112, help="width of the terminal")
    args = parser.parse_args()
    lines, code = record(args.command, args.columns)
    if code:
        print(f"error: {shlex.join(args.command)} ended with exit code {code}, expected 0", file=sys.stderr)
        return 1
    picture = write_svg(shlex.join(args.command), wrap(lines, args.columns), args.columns)
    args.file.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
