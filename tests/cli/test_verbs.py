"""The table of verbs: what it says is what the verbs say, and listing them imports none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from convoy.cli.verbs import VERBS, Verb

HEAVY = ("torch", "transformers", "numpy", "starlette", "uvicorn", "sqlalchemy", "httpx", "cryptography")


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


def test_the_package_imports_nothing_heavy() -> None:
    assert imported_by("import convoy").isdisjoint(HEAVY)


def test_the_help_page_imports_no_verb_and_nothing_heavy() -> None:
    modules = imported_by("from convoy.cli.main import run\nassert run(['--help']) == 0")
    assert modules.isdisjoint(HEAVY)
    assert modules.isdisjoint(f"convoy.cli.{verb.target.partition(':')[0]}" for verb in VERBS)
