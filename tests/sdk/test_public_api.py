"""The public names of `import convoy` and their signatures: a change here is a change for users."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import convoy
import convoy.testing

ERRORS = {
    "CapacityError",
    "ConvoyError",
    "HttpRefused",
    "InputError",
    "PeerError",
    "ServerBusy",
    "Unavailable",
}
NAMES = {
    *ERRORS,
    *("Certificate", "Client", "ClusterStatus", "PlanReport", "Reply", "SamplingParams", "Server", "Session"),
    *("connect", "errors", "plan", "serve", "testing", "verify"),
}
TESTING = {
    *("Cut", "Drop", "Fault", "FlipBit", "Reorder", "Repeat", "Stall"),
    *("Script", "ScriptedCall"),
    *("MemoryNetwork", "MemoryStream", "RecordedStream", "memory_link_pair", "memory_stream_pair", "serve"),
}
# Parameters in their order; those behind the star are given by name.
PARAMETERS = {
    "serve": "model * members config layers kernel compute device num_threads engine port key ca",
    "connect": "url * key ca timeout_s",
    "plan": "model * members config layers standbys kernel compute kv_dtype context measure devices",
    "verify": "model * kernel max_cuts prompts num_tokens device ranks num_threads kv_dtype on_progress",
    "testing.serve": "model * members faults num_threads script",
    "Client.chat": "self messages * model sampling",
    "Client.generate": "self prompt * model sampling",
    "Client.stream": "self messages * model sampling",
    "Client.status": "self",
    "Client.models": "self",
    "Server.session": "self params * salt timeout_s",
    "Server.close": "self",
    "Session.sync": "self tokens",
    "Session.eval": "self token",
    "Session.sample": "self params",
    "Session.logits": "self",
    "Session.rewind": "self position",
    "Session.fork": "self * choice",
    "Session.save": "self path key progress",
    "Session.load": "self path key progress",
    "Session.close": "self",
}


def parameters_of(place: str) -> str:
    value: object = convoy
    for name in place.split("."):
        value = getattr(value, name)
    assert callable(value)
    words: list[str] = []
    for parameter in inspect.signature(value).parameters.values():
        named = parameter.kind in {parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD}
        words += ["*"] if named and "*" not in words else []
        words.append(parameter.name)
    return " ".join(words)


def test_the_public_names_are_these() -> None:
    assert set(convoy.__all__) == NAMES
    assert set(convoy.testing.__all__) == TESTING
    assert set(dir(convoy)) >= NAMES


@pytest.mark.parametrize("place", PARAMETERS)
def test_a_public_function_has_these_parameters(place: str) -> None:
    assert parameters_of(place) == PARAMETERS[place]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_public_name_is_imported_on_its_first_use(name: str) -> None:
    assert getattr(convoy, name) is getattr(convoy, name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(convoy.__file__).read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(typed) == sorted(NAMES)
    assert Path(convoy.__file__).with_name("py.typed").exists()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'start'"):
        convoy.start  # type: ignore[attr-defined] # noqa: B018


def test_the_main_errors_are_of_one_tree() -> None:
    for name in ERRORS:
        assert issubclass(getattr(convoy, name), convoy.errors.ConvoyError)


def test_the_function_plan_stays_a_function_after_the_package_is_imported() -> None:
    code = (
        "import convoy, convoy.plan.report\nfrom convoy.plan.span import Span\nprint(callable(convoy.plan))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"
