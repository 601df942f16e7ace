"""Private names of the package that tests touch: each one ties a test to how a thing is made.

Private means one leading underscore, and ours means that a module of `src` defines the name. A test touches
one when it reads or sets it on an object, imports it, or gives it as a string to `setattr` or `__dict__`. It
may use the underscores of its own classes: an attribute of ``self`` or ``cls``, and a name that its own file
defines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

MAX_FILES = 10

# The files that may, each with its reason.
ALLOWED = {
    "tests/support/link_parts.py": (
        "is the one way of all tests into a live link or listener, which keeps its keys and streams to itself"
    ),
    "tests/transport/link/test_replacement.py": (
        "plays a dialler or listener that breaks the rules of SWITCH, which no link does of itself"
    ),
    "tests/crypto/test_key_life.py": "shows that secrets are overwritten, and nothing else may read secrets",
    "tests/engine/kv/test_block_pool.py": "damages a pool as no call does, so that the check finds it",
    "tests/support/recorded.py": "reads `_fields_` of structures, which is the name of ctypes and not ours",
    "tests/gpu/test_device_ranks.py": "breaks one rank's counter and kernel on a device, as no call does",
}

# Named tuples and libraries have such names too, which this rule does not concern.
_LIBRARY_NAMES = {"_replace", "_asdict", "_fields"}
_LIBRARY_OBJECTS = {"torch", "mkldnn", "sys", "os", "argparse", "const", "oid"}


@cache
def own_names(src: Path) -> frozenset[str]:
    """Return the private names of functions, classes, variables and attributes that ``src`` defines."""
    found: set[str] = set()
    for path in src.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
    return frozenset(name for name in found if is_private(name) and name not in _LIBRARY_NAMES)


def is_private(name: str) -> bool:
    """Return whether ``name`` begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def touches(tree: ast.Module, ours: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each touch of a name of ``ours`` in a test module."""
    foreign = ours - _defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if (
                node.attr in foreign
                and not _is_self(node.value)
                and _last_name(node.value) not in _LIBRARY_OBJECTS
            ):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Constant) and node.slice.value in ours:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] == "convoy":
                yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and _last_name(node.func) in {"setattr", "delattr", "getattr"}:
            for given in node.args:
                text = given.value if isinstance(given, ast.Constant) else None
                if isinstance(text, str) and any(part in ours for part in text.split(".")):
                    yield node.lineno, text


def _defined(tree: ast.Module) -> set[str]:
    """Return the names that this file's own functions, classes and instances have."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@cache
def touching_files(root: Path) -> Mapping[str, list[tuple[int, str]]]:
    """Return the test files of the repository at ``root`` that touch private names of ours, and where."""
    ours = own_names(root / "src")
    found: dict[str, list[tuple[int, str]]] = {}
    for path in sorted((root / "tests").rglob("*.py")):
        sites = sorted(set(touches(ast.parse(path.read_text(encoding="utf-8")), ours)))
        if sites:
            found[path.relative_to(root).as_posix()] = sites
    return found
