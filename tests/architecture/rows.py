"""The rules about facts with one row: families and kernels stand in one place, and classes are no texts."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from architecture.source import Module


def scattered_words(modules: list[Module], words: Collection[str], home: str) -> list[str]:
    """Return the literals that are one of ``words``, outside the package or module ``home``."""
    return [
        f"{module.at(node)}: {node.value!r} stands in {home} alone: read its row"
        for module in modules
        if not f"{module.name}.".startswith(f"{home}.")
        for node in module.nodes
        if isinstance(node, ast.Constant) and node.value in words
    ]


def shared_words(modules: list[Module], words: Collection[str], home: str) -> list[str]:
    """Return the words that no module below the package ``home`` has as a literal, or more than one."""
    homes: dict[str, set[str]] = {word: set() for word in words}
    for module in modules:
        if module.name.startswith(f"{home}."):
            for node in module.nodes:
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in homes:
                    homes[node.value].add(module.name)
    return [f"{word}: {sorted(found)}, expected one" for word, found in homes.items() if len(found) != 1]


def classes_by_name(modules: list[Module]) -> list[str]:
    """Return the places that choose by the text of a class's name: comparisons, look-ups and prefixes."""
    return [
        f"{module.at(node)}: a class is chosen by the text of its name"
        for module in modules
        for node in module.nodes
        if any(_is_name_of_class(part) for part in _deciding(node))
    ]


def _deciding(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of ``node`` by which it decides."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Subscript):
        yield node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"startswith", "endswith", "removeprefix", "removesuffix"}:
            yield from (node.func.value, *node.args)
        elif node.func.attr == "get":
            yield from node.args


def _is_name_of_class(node: ast.AST) -> bool:
    """Return whether ``node`` is ``type(x).__name__`` or ``x.__class__.__name__``."""
    if not isinstance(node, ast.Attribute) or node.attr not in {"__name__", "__qualname__"}:
        return False
    of = node.value
    called = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "type"
    return called or (isinstance(of, ast.Attribute) and of.attr == "__class__")
