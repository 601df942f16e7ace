"""The rules of imports between modules. Each returns its violations as ``file:line: text``."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import pairwise

from architecture.source import Module, import_graph, imports_of

# Ground floor first: a room may import itself and the rooms of earlier rows.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "errors",
        "config",
        "crypto",
        "wire",
        "transport",
        "trust",
        "plan",
        "model",
        "engine",
        "cluster",
        "api",
        "fleet",
        "bench evaluate",
        "sdk",
        "testing",
        "cli",
        "__main__",
    )
)
FLOOR = {room: floor for floor, rooms in enumerate(LAYERS) for room in rooms}
_ROOMS_FROM_MODEL = frozenset(room for room, floor in FLOOR.items() if floor >= FLOOR["model"])

# Outside package -> the only rooms that may import it.
RESERVED: dict[str, frozenset[str]] = {
    "cryptography": frozenset({"crypto"}),
    "torch": _ROOMS_FROM_MODEL,
    "transformers": _ROOMS_FROM_MODEL,
    "safetensors": _ROOMS_FROM_MODEL,
    "tokenizers": _ROOMS_FROM_MODEL,
    "asyncio": frozenset({"api", "fleet"}),
    "anyio": frozenset({"api", "fleet"}),
    "starlette": frozenset({"api", "fleet"}),
    "uvicorn": frozenset({"api", "fleet"}),
    "opentelemetry": frozenset({"api"}),
    "prometheus_client": frozenset({"api", "cluster", "fleet"}),
    "typer": frozenset({"cli"}),
    "click": frozenset({"cli"}),
    "rich": frozenset({"cli"}),
}
# Outside package -> the only packages and modules that may import it.
WITHIN: dict[str, tuple[str, ...]] = {"mlx": ("convoy.model.backends.mlx.", "convoy.model.mlx_device")}
# Codec module of msgspec -> rooms beside wire/ that may use it. HTTP bodies are JSON, and config/ only makes
# decoders to resolve types.
CODECS: dict[str, frozenset[str]] = {
    "msgpack": frozenset({"wire"}),
    "json": frozenset({"api", "config", "fleet", "wire"}),
    "toml": frozenset({"wire"}),
    "yaml": frozenset({"wire"}),
}


@dataclass(frozen=True)
class Purity:
    """Describe modules (a room "convoy.plan", or one module) that must not reach ``forbidden``."""

    prefix: str
    forbidden: frozenset[str]


_DECIDES = frozenset(
    {"torch", "transformers", "safetensors", "tokenizers", "socket", "ssl", "asyncio", "threading"}
)
_SANS_IO = frozenset(["socket", "ssl", "asyncio", "select", "selectors", "threading", "subprocess"])
PURE = (
    Purity("convoy.plan", _DECIDES),
    Purity("convoy.trust", _DECIDES - {"threading"}),
    Purity("convoy.engine.scheduler", _DECIDES),
    Purity("convoy.engine.kv.block_pool", _DECIDES),
    Purity("convoy.engine.requests.request", _DECIDES),
    Purity("convoy.engine.sequence", _DECIDES),
    Purity("convoy.crypto", _SANS_IO),
    Purity("convoy.wire", _SANS_IO),
)


# They meet over a socket alone; what they share lies beside them.
PROGRAMS = tuple(f"convoy.fleet.{part}" for part in ("coordinator", "provider", "proxy"))


def wrong_direction(modules: list[Module]) -> list[str]:
    """Return imports up the house or to a neighbour on the same floor, and rooms that it does not have."""
    by_name = {module.name: module for module in modules}
    found = []
    for module in modules:
        if module.room and module.room not in FLOOR:
            found.append(f"{module.place}:1: {module.room} is not a room of the house")
    for name, edges in import_graph(modules).items():
        importer = by_name[name]
        for target, line in edges.items():
            imported = by_name[target]
            if not imported.room or imported.room == importer.room:
                continue
            upstairs = not importer.room or FLOOR.get(imported.room, 0) >= FLOOR.get(importer.room, 0)
            if upstairs:
                found.append(f"{importer.place}:{line}: {importer.room or 'convoy'} imports {target}")
    return sorted(found)


def doubles_in_production(modules: list[Module]) -> list[str]:
    """Return the imports of ``convoy.testing`` outside itself and the benches: production code needs none."""
    places = {module.name: module for module in modules}
    return sorted(
        f"{places[name].place}:{line}: {name} imports {target}, a test double"
        for name, edges in import_graph(modules).items()
        for target, line in edges.items()
        if f"{target}.".startswith("convoy.testing.") and places[name].room not in {"testing", "bench"}
    )


def neighbours(modules: list[Module]) -> list[str]:
    """Return imports between parts of a room that are programs of their own."""
    places = {module.name: module.place for module in modules}
    found = []
    for name, edges in import_graph(modules).items():
        for target, line in edges.items():
            mine, other = _program(name), _program(target)
            if mine and other and mine != other:
                found.append(f"{places[name]}:{line}: {mine} imports {target}")
    return sorted(found)


def _program(name: str) -> str | None:
    return next((part for part in PROGRAMS if f"{name}.".startswith(f"{part}.")), None)


def import_cycles(modules: list[Module]) -> list[str]:
    """Return one line for each import that closes a circle."""
    graph = import_graph(modules)
    places = {module.name: module.place for module in modules}
    done: set[str] = set()
    found: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        path.append(name)
        for target, line in sorted(graph[name].items()):
            if target in path:
                circle = " -> ".join([*path[path.index(target) :], target])
                found.append(f"{places[name]}:{line}: {circle}")
            elif target not in done:
                visit(target, path)
        done.add(path.pop())

    for name in sorted(graph):
        if name not in done:
            visit(name, [])
    return found


def package_cycles(modules: list[Module]) -> list[str]:
    """Return one line for each circle of imports between the parts of a package.

    The parts of a package are its modules and its sub-packages. A sub-package counts as one part with all
    that is in it. So a reader can learn a package's parts one after the other.
    """
    graph = import_graph(modules)
    packages = {name.rpartition(".")[0] for name in graph}
    packages |= {name.rpartition(".")[0] for name in packages}
    found = []
    for package in sorted(packages - {""}):
        parts: dict[str, dict[str, str]] = {}
        for name, edges in graph.items():
            for target in edges:
                mine, other = _part(package, name), _part(package, target)
                if mine and other and mine != other:
                    parts.setdefault(mine, {}).setdefault(other, f"{name} imports {target}")
        found += [f"{package}: " + "; ".join(circle) for circle in _circles(parts)]
    return found


def _part(package: str, name: str) -> str | None:
    """Return the part of ``package`` that holds the module ``name``; None outside it and for itself."""
    if not name.startswith(f"{package}."):
        return None
    return name[len(package) + 1 :].partition(".")[0]


def _circles(graph: dict[str, dict[str, str]]) -> list[list[str]]:
    """Return the edges of each circle that a walk in depth finds, as the texts of ``graph``."""
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(name: str, path: list[str]) -> None:
        path.append(name)
        for target in sorted(graph.get(name, {})):
            if target in path:
                ring = [*path[path.index(target) :], target]
                found.append([graph[a][b] for a, b in pairwise(ring)])
            elif target not in done:
                visit(target, path)
        done.add(path.pop())

    for name in sorted(graph):
        if name not in done:
            visit(name, [])
    return found


def reserved_imports(modules: list[Module]) -> list[str]:
    """Return outside packages imported in a room, or a package, that they are not meant for."""
    found = set()
    for module in modules:
        for item in imports_of(module):
            package = item.target.split(".")[0]
            if package in WITHIN and not module.name.startswith(WITHIN[package]):
                found.add(f"{module.place}:{item.line}: {package} belongs in {' and '.join(WITHIN[package])}")
            if package in RESERVED and module.room not in RESERVED[package]:
                found.add(
                    f"{module.place}:{item.line}: {package} belongs in {_rooms(RESERVED[package])} "
                    f"and not in {module.room or 'convoy'}"
                )
    return sorted(found)


def reserved_codecs(modules: list[Module]) -> list[str]:
    """Return uses of msgspec's codecs outside the rooms that turn bytes into values."""
    found = set()
    for module in modules:
        uses = [(item.target, item.line) for item in imports_of(module)]
        uses += [
            (f"{node.value.id}.{node.attr}", node.lineno)
            for node in module.nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        ]
        for target, line in uses:
            codec = target.removeprefix("msgspec.").split(".")[0]
            if target.startswith("msgspec.") and codec in CODECS and module.room not in CODECS[codec]:
                found.add(
                    f"{module.place}:{line}: msgspec.{codec} belongs in {_rooms(CODECS[codec])} "
                    f"and not in {module.room or 'convoy'}"
                )
    return sorted(found)


def impure_modules(modules: list[Module], rules: tuple[Purity, ...] = PURE) -> list[str]:
    """Return forbidden packages that a pure module imports, or that a module it imports does."""
    by_name = {module.name: module for module in modules}
    graph = import_graph(modules)
    found = set()
    for rule in rules:
        for module in modules:
            if module.name != rule.prefix and not module.name.startswith(rule.prefix + "."):
                continue
            for name in sorted(_reachable(graph, module.name)):
                for item in imports_of(by_name[name]):
                    if item.target.split(".")[0] in rule.forbidden:
                        package = item.target.split(".")[0]
                        place = f"{by_name[name].place}:{item.line}"
                        found.add(f"{place}: {package} is reachable from {module.name}, which is pure")
    return sorted(found)


def _reachable(graph: dict[str, dict[str, int]], start: str) -> set[str]:
    """Return ``start`` and all that its import executes, also the __init__ of each package on the way."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name in graph and name not in seen:
            seen.add(name)
            todo += [*graph[name], name.rpartition(".")[0]]
    return seen


def _rooms(rooms: frozenset[str]) -> str:
    return ", ".join(sorted(rooms, key=lambda room: FLOOR[room]))
