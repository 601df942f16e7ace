"""The Python examples of the documentation run as they stand, and print what the pages say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from support.page_examples import PageExample, examples_of

PAGES = {"sessions.md": 1, "python.md": 5}
EXAMPLES = [
    pytest.param(example, id=f"{page}-{index}")
    for page in PAGES
    for index, example in enumerate(examples_of(page))
]


def test_every_example_of_the_pages_is_found() -> None:
    assert {page: len(examples_of(page)) for page in PAGES} == PAGES


def test_an_example_needs_one_import_of_convoy() -> None:
    for example in (example for page in PAGES for example in examples_of(page)):
        lines = example.code.splitlines()
        assert len([line for line in lines if "import" in line and "convoy" in line]) == 1


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_runs_as_it_stands(
    example: PageExample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    (tmp_path / "example.py").write_text(example.code)
    try:
        runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out == example.output
