"""The Python examples of a page, each with the output that the page shows for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
_EXAMPLE = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\nIt prints:\n\n^```\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class PageExample:
    """Hold the code of one example and its output; an example without a shown output prints nothing."""

    code: str
    output: str


def examples_of(page: str) -> list[PageExample]:
    """Return the examples of a page in docs/, in its order."""
    text = (DOCS / page).read_text("utf-8")
    return [PageExample(found["code"], found["output"] or "") for found in _EXAMPLE.finditer(text)]
