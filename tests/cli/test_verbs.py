"""The table of verbs: what it says is what the verbs say, and listing them imports none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from convoy.cli.verbs import VERBS, Verb

HEAVY = ("torch", "transformers", "numpy", "starlette", "uvicorn", "sqlalchemy", "httpx", "cryptography")

# Those that the help page may import: they parse the command line and draw the page.
LIGHT = {"typer", "rich", "shellingham", "typing_extensions", "annotated_doc", "click", "markdown_it"}


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_a_row_has_the_first_sentence_of_its_verbs_help(verb: Verb) -> None:
    command = verb.load()
    assert command.name == verb.name
    assert command.get_short_help_str(200) == verb.line


def imported_by(code: str) -> set[str]:
    program = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    found: set[str] = set(json.loads(done.stderr.splitlines()[-1]))
    return found


def outside(modules: set[str]) -> set[str]:
    """Return the outside packages among modules, apart from those that Python starts with."""
    started = imported_by("pass")
    own = sys.stdlib_module_names | {"convoy", "__main__", "__mp_main__"}
    return {name.partition(".")[0] for name in modules - started} - own


def test_the_package_imports_nothing_heavy() -> None:
    modules = imported_by("import convoy")
    assert modules.isdisjoint(HEAVY)
    assert outside(modules) == set()
    assert {name for name in modules if name.startswith("convoy")} == {"convoy", "convoy.plan"}


def test_a_client_and_a_plan_need_neither_torch_nor_a_web_framework() -> None:
    modules = imported_by("import convoy\nconvoy.connect, convoy.plan, convoy.serve, convoy.ClusterStatus")
    assert modules.isdisjoint({"torch", "transformers", "starlette", "uvicorn", "sqlalchemy", "httpx"})


def test_the_help_page_imports_no_verb_and_nothing_heavy() -> None:
    modules = imported_by("from convoy.cli.main import run\nassert run(['--help']) == 0")
    assert modules.isdisjoint(HEAVY)
    assert outside(modules) <= LIGHT
    assert modules.isdisjoint(f"convoy.cli.{verb.target.partition(':')[0]}" for verb in VERBS)
