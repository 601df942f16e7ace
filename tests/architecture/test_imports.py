"""Each rule about imports finds a planted violation, names its line, and lets the lawful neighbour pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from architecture.imports import (
    PURE,
    Purity,
    doubles_in_production,
    import_cycles,
    impure_modules,
    neighbours,
    package_cycles,
    reserved_codecs,
    reserved_imports,
    wrong_direction,
)
from architecture.source import Module, load_modules

Tree = Callable[[dict[str, str]], list[Module]]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Write ``{"wire/frame.py": text}`` under src/convoy, add empty __init__ files, and load it."""

    def build(files: dict[str, str]) -> list[Module]:
        package = tmp_path / "src" / "convoy"
        for name, text in {"__init__.py": "", **files}.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            (path.parent / "__init__.py").touch()
        return load_modules(tmp_path / "src")

    return build


@pytest.mark.parametrize(
    "text",
    [
        "from convoy.model.stage import Stage",
        "import convoy.model.stage",
        "from convoy.model import stage",
        "from ..model import stage",
        "def late():\n    from convoy.model.stage import Stage",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from convoy.model import stage",
        "import importlib\nimportlib.import_module('convoy.model.stage')",
    ],
)
def test_a_lower_room_that_imports_a_higher_one_is_found(tree: Tree, text: str) -> None:
    found = wrong_direction(tree({"wire/frame.py": text, "model/stage.py": "Stage = 1"}))
    line = text.count("\n") + 1
    assert f"src/convoy/wire/frame.py:{line}: wire imports convoy.model.stage" in found


def test_a_higher_room_may_import_a_lower_one_and_itself(tree: Tree) -> None:
    modules = tree(
        {
            "model/stage.py": "import convoy\nfrom convoy.wire import frame\nfrom convoy.model import source",
            "model/source.py": "load = 1",
            "wire/frame.py": "from convoy.errors import FrameError",
            "errors.py": "FrameError = 1",
        }
    )
    assert wrong_direction(modules) == []


def test_rooms_of_one_floor_may_not_import_each_other(tree: Tree) -> None:
    found = wrong_direction(tree({"bench/hop.py": "import convoy.evaluate.score", "evaluate/score.py": ""}))
    assert found == ["src/convoy/bench/hop.py:1: bench imports convoy.evaluate.score"]


def test_a_test_double_in_production_code_is_found(tree: Tree) -> None:
    files = dict.fromkeys(("cli/run.py", "bench/hop.py"), "from convoy.testing.network import Memory")
    found = doubles_in_production(tree({**files, "testing/network.py": "Memory = 1"}))
    assert found == ["src/convoy/cli/run.py:1: convoy.cli.run imports convoy.testing.network, a test double"]


def test_programs_of_one_room_may_not_import_each_other(tree: Tree) -> None:
    text = "from convoy.fleet.lease import Lease\nfrom convoy.fleet.coordinator.way import start"
    files = {
        "fleet/proxy/proxy.py": text,
        "fleet/lease.py": "Lease = 1",
        "fleet/coordinator/way.py": "start = 1",
    }
    found = neighbours(tree(files))
    assert found == [
        "src/convoy/fleet/proxy/proxy.py:2: convoy.fleet.proxy imports convoy.fleet.coordinator.way"
    ]


def test_the_package_itself_may_not_import_a_room(tree: Tree) -> None:
    found = wrong_direction(tree({"__init__.py": "from convoy import wire", "wire/frame.py": ""}))
    assert found == ["src/convoy/__init__.py:1: convoy imports convoy.wire"]


def test_the_package_itself_may_name_types_of_a_room(tree: Tree) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from convoy.wire import frame"
    modules = tree({"__init__.py": text, "wire/frame.py": "import convoy"})
    assert wrong_direction(modules) == import_cycles(modules) == []


def test_a_room_that_the_house_does_not_have_is_found(tree: Tree) -> None:
    found = wrong_direction(tree({"network/socket.py": ""}))
    assert "src/convoy/network/socket.py:1: network is not a room of the house" in found


def test_a_cycle_is_found_even_when_a_function_hides_it(tree: Tree) -> None:
    modules = tree(
        {
            "plan/a.py": "from convoy.plan.b import two",
            "plan/b.py": "from convoy.plan.c import three",
            "plan/c.py": "def late():\n    from convoy.plan.a import one",
        }
    )
    assert import_cycles(modules) == [
        "src/convoy/plan/c.py:2: convoy.plan.a -> convoy.plan.b -> convoy.plan.c -> convoy.plan.a"
    ]


def test_two_ways_to_one_module_are_no_cycle(tree: Tree) -> None:
    modules = tree(
        {
            "plan/a.py": "import convoy.plan.b\nimport convoy.plan.c",
            "plan/b.py": "import convoy.plan.d",
            "plan/c.py": "import convoy.plan.d",
            "plan/d.py": "",
        }
    )
    assert import_cycles(modules) == []


@pytest.mark.parametrize(
    ("file", "text", "package"),
    [
        ("transport/tls.py", "from cryptography import x509", "cryptography"),
        ("plan/spec.py", "import torch.nn", "torch"),
        ("transport/link.py", "def late():\n    import torch", "torch"),
        ("model/stage.py", "import mlx.core as mx", "mlx"),
        ("engine/engine.py", "import asyncio", "asyncio"),
        ("engine/engine.py", "from starlette.responses import Response", "starlette"),
        ("api/app.py", "from rich.console import Console", "rich"),
        ("cli/main.py", "from uvicorn import run", "uvicorn"),
    ],
)
def test_an_outside_package_in_a_room_not_meant_for_it_is_found(
    tree: Tree, file: str, text: str, package: str
) -> None:
    found = reserved_imports(tree({file: text}))
    line = text.count("\n") + 1
    assert len(found) == 1
    assert found[0].startswith(f"src/convoy/{file}:{line}: {package} belongs in ")


def test_outside_packages_in_their_own_rooms_pass(tree: Tree) -> None:
    modules = tree(
        {
            "crypto/seal.py": "import cryptography",
            "model/stage.py": "import torch, transformers",
            "model/backends/mlx/stage.py": "import mlx.core as mx",
            "cluster/head.py": "import torch",
            "api/app.py": "import asyncio, starlette, uvicorn",
            "cli/main.py": "import typer, rich",
        }
    )
    assert reserved_imports(modules) == []


@pytest.mark.parametrize(
    "text",
    [
        "import msgspec\nmsgspec.msgpack.encode(1)",
        "import msgspec\nmsgspec.json.decode(b'1')",
        "import msgspec\n\nfrom msgspec import toml",
        "import msgspec\n\nfrom msgspec.msgpack import Decoder",
    ],
)
def test_a_codec_outside_the_wire_is_found(tree: Tree, text: str) -> None:
    found = reserved_codecs(tree({"engine/peer.py": text}))
    assert len(found) == 1
    assert found[0].startswith(f"src/convoy/engine/peer.py:{text.count(chr(10)) + 1}: msgspec.")


def test_structs_pass_everywhere_and_json_where_http_is_spoken(tree: Tree) -> None:
    modules = tree(
        {
            "engine/requests/request.py": "import msgspec\nmsgspec.Struct\nmsgspec.convert",
            "api/body.py": "import msgspec\nmsgspec.json.decode",
            "wire/codec.py": "import msgspec\nmsgspec.msgpack.decode",
        }
    )
    assert reserved_codecs(modules) == []


@pytest.mark.parametrize("rule", PURE, ids=lambda rule: rule.prefix)
def test_a_pure_module_that_imports_a_socket_is_found(tree: Tree, rule: Purity) -> None:
    prefix = rule.prefix
    file = prefix.removeprefix("convoy.").replace(".", "/") + ".py"
    if "/" not in file:
        file = f"{file.removesuffix('.py')}/noun.py"
    found = impure_modules(tree({file: "x = 1\nimport socket"}))
    assert len(found) == 1
    assert found[0].startswith(f"src/convoy/{file}:2: socket is reachable from {prefix}")


def test_what_a_pure_module_imports_must_be_pure_too(tree: Tree) -> None:
    modules = tree(
        {
            "engine/requests/request.py": "def late():\n    from convoy.model.params import SamplingParams",
            "model/params.py": "from convoy.model import kernels",
            "model/kernels.py": "import torch",
        }
    )
    assert impure_modules(modules) == [
        "src/convoy/model/kernels.py:1: torch is reachable from convoy.engine.requests.request, which is pure"
    ]


def test_the_init_of_a_package_on_the_way_counts(tree: Tree) -> None:
    modules = tree(
        {
            "engine/kv/block_pool.py": "import convoy.model.params",
            "model/__init__.py": "import torch",
            "model/params.py": "",
        }
    )
    assert impure_modules(modules) == [
        "src/convoy/model/__init__.py:1: torch is reachable from convoy.engine.kv.block_pool, which is pure"
    ]


def test_an_impure_neighbour_that_is_not_imported_does_not_count(tree: Tree) -> None:
    assert (
        impure_modules(tree({"engine/scheduler.py": "", "engine/engine.py": "import threading, torch"})) == []
    )


def test_parts_of_a_package_that_import_each_other_are_found(tree: Tree) -> None:
    files = {
        "engine/run/local.py": "from convoy.engine.kv.pools import Pool",
        "engine/run/pipeline.py": "",
        "engine/kv/pools.py": "",
        "engine/kv/limits.py": "from convoy.engine.run import pipeline",
    }
    assert import_cycles(tree(files)) == []
    assert package_cycles(tree(files)) == [
        "convoy.engine: convoy.engine.kv.limits imports convoy.engine.run; "
        "convoy.engine.run.local imports convoy.engine.kv.pools"
    ]


def test_a_module_beside_a_sub_package_may_be_its_floor_or_its_roof(tree: Tree) -> None:
    files = {
        "engine/engine.py": "from convoy.engine.run.local import Executor",
        "engine/run/local.py": "from convoy.engine.sequence import Sequence",
        "engine/sequence.py": "",
    }
    assert package_cycles(tree(files)) == []
