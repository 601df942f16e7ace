"""Measure how much one must read: the size of modules, packages and README, and two paths through the code.

Each figure has a row in prose_limits.toml beside those of `architecture.prose`, and `scripts/house.py` prints
them. Modules are found by the class that they define, so that a renamed file is still measured.
"""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

from architecture.shape import crowded_packages, repeated_class_names
from architecture.source import Module, import_graph, load_modules

LOOP_CLASS = "Engine"
PEER_LOOP_CLASS = "StageWorker"
ERRORS = "convoy.errors"


def measure_structure(root: Path) -> dict[str, float]:
    """Return each figure of the repository at ``root`` by the name that prose_limits.toml has for it."""
    modules = load_modules(root / "src")
    readme = (root / "README.md").read_text(encoding="utf-8")
    sizes = [len(module.lines) for module in modules if not module.is_package]
    return {
        "modules_per_10k_lines": round(10_000 * len(sizes) / sum(sizes), 1),
        "median_module_lines": median(sizes),
        "loop_modules": len(loop_modules(modules)),
        "peer_step_modules": len(peer_step_modules(modules)),
        "crowded_packages": len(crowded_packages(modules)),
        "repeated_class_names": len(repeated_class_names(modules)),
        "hint_share": hint_share(modules),
        "readme_words": len(readme.split()),
        "readme_lines": len(readme.splitlines()),
    }


def loop_modules(modules: list[Module]) -> list[str]:
    """Return the modules that a reader of the engine's loop opens.

    These are the loop's own, and all beside it that its imports reach. A sub-package counts as one subject
    behind its docstring, so its modules are left out.
    """
    start = defining(modules, LOOP_CLASS)
    package = start.rpartition(".")[0]
    graph = import_graph([module for module in modules if not module.is_package])
    found: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name not in found and name.startswith(f"{package}."):
            found.add(name)
            todo += graph[name]
    return sorted(name for name in found if name.rpartition(".")[0] == package)


def peer_step_modules(modules: list[Module]) -> list[str]:
    """Return the module with the loop of a peer, and all that it imports but the errors."""
    start = defining(modules, PEER_LOOP_CLASS)
    graph = import_graph([module for module in modules if not module.is_package])
    return sorted({start, *graph[start]} - {ERRORS})


def hint_share(modules: list[Module]) -> float:
    """Return how many of 100 errors of `errors.py` carry a hint where they are raised."""
    (errors,) = [module for module in modules if module.name == ERRORS]
    names = {node.name for node in errors.tree.body if isinstance(node, ast.ClassDef)}
    hinted = [
        any(keyword.arg == "hint" for keyword in node.exc.keywords)
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id in names
    ]
    return round(100 * sum(hinted) / max(1, len(hinted)), 2)


def defining(modules: list[Module], name: str) -> str:
    """Return the module that defines the class ``name``. It is an error if none or several do."""
    (found,) = [
        module.name
        for module in modules
        if any(isinstance(node, ast.ClassDef) and node.name == name for node in module.tree.body)
    ]
    return found
