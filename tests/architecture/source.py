"""Python sources as syntax trees, and what each one imports. Nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """Hold a parsed file: ``name`` is dotted ("convoy.wire.frame"), ``place`` is its name in a violation."""

    name: str
    place: str
    lines: tuple[str, ...]
    tree: ast.Module
    is_package: bool

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Return every node of the tree. A walk takes longer than most of what is then looked for."""
        return tuple(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """Return "wire" for convoy.wire.frame, "errors" for convoy.errors, "" for the package itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    def at(self, node: ast.AST) -> str:
        return f"{self.place}:{getattr(node, 'lineno', 1)}"


@dataclass(frozen=True)
class Import:
    """Name an imported module (or name in a module) and the line that asks for it, anywhere in the file."""

    target: str
    line: int


def load_modules(root: Path, package: str = "convoy") -> list[Module]:
    """Return every module of ``root/package``, sorted by name."""
    return [_load(path, root) for path in sorted((root / package).rglob("*.py"))]


def load_scripts(folder: Path) -> list[Module]:
    """Return the modules of a folder that is not a package."""
    return [_load(path, folder) for path in sorted(folder.rglob("*.py"))]


def _load(path: Path, root: Path) -> Module:
    relative = path.relative_to(root)
    parts = list(relative.with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    if is_package:
        parts.pop()
    text = path.read_text(encoding="utf-8")
    return Module(
        name=".".join(parts),
        place=f"{root.name}/{relative.as_posix()}",
        lines=tuple(text.splitlines()),
        tree=ast.parse(text, filename=str(path)),
        is_package=is_package,
    )


def imports_of(module: Module) -> Iterator[Import]:
    """Yield all imports, those inside functions and under TYPE_CHECKING too.

    ``from a import b`` yields "a" and "a.b": which of them is a module is for the caller to know.
    """
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            yield Import(source, node.lineno)
            for alias in node.names:
                yield Import(f"{source}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            literal = node.args[0] if node.args else None
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                yield Import(literal.value, node.lineno)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    drop = node.level - 1 if module.is_package else node.level
    kept = parts[: len(parts) - drop]
    return ".".join([*kept, node.module] if node.module else kept)


def _is_dynamic_import(call: ast.Call) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    return name in {"__import__", "import_module"}


def import_graph(modules: list[Module]) -> dict[str, dict[str, int]]:
    """Return, by module name, the modules of the same list that it imports, with the first line that does.

    The package itself names its parts for type checkers alone, and imports each on its first use.
    `test_the_package_imports_nothing_heavy` looks at what it really imports.
    """
    names = {module.name for module in modules}
    graph: dict[str, dict[str, int]] = {}
    for module in modules:
        edges: dict[str, int] = {}
        typed = _lines_for_types(module) if module.is_package and not module.room else frozenset()
        for item in imports_of(module):
            # `from convoy.plan import spec` is an import of spec; the package's __init__ runs in any case.
            if item.target in names and item.target != module.name and item.line not in typed:
                edges.setdefault(item.target, item.line)
        graph[module.name] = edges
    return graph


def _lines_for_types(module: Module) -> frozenset[int]:
    """Return the lines of the blocks under ``if TYPE_CHECKING``."""
    return frozenset(
        line
        for node in module.nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for part in node.body
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)
    )
