"""Names of modules and paths of files in docstrings, comments and documents: each one exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from architecture.source import Module, import_graph

# `placement.modes`, `convoy.wire.frame`, `engine.recovery.Recovery`.
_DOTTED = re.compile(r"`((?:[a-z_]\w*\.)+[A-Za-z_]\w*)(?:\(\))?`")
_SINGLE = re.compile(r"`([a-z_]\w*)`")
_PATH = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)+[\w-]+\.py)\b")
# The ends of file names and host names, which are no modules.
_FILE_ENDINGS = frozenset({"c", "com", "db", "json", "key", "md", "py", "toml"})
Known = dict[str, list[Module]]
# Folders that a path may begin from. A document's path may also begin from the document.
_BASES = ("", "src", "src/convoy", "tests")
# Libraries with files that we name.
_LIBRARIES = frozenset({"torch", "transformers", "vllm"})
# From so many importers in other packages on, a module is one that a reader of the package must hear of.
MIN_OUTSIDE_IMPORTERS = 10
_QUOTED = re.compile(r"`([^`]+)`")


def stale_module_names(modules: list[Module]) -> list[str]:
    """Return the dotted names in docstrings and comments that begin with a package and lead to no module.

    A name may begin at any package, as a reader inside that package writes it.
    """
    known = _endings(modules)
    packages = {module.name.rpartition(".")[2] for module in modules if module.is_package}
    return [
        f"{place}: no module is named {name}"
        for module in modules
        for place, text in _texts(module)
        for name in _DOTTED.findall(text)
        if name.partition(".")[0] in packages and not _leads_to_module(name, known)
    ]


def stale_package_members(modules: list[Module]) -> list[str]:
    """Return the single names in packages' docstrings that are of no module, export or identifier there.

    A module of another package is no excuse for the name: it has moved away.
    """
    last = {module.name.rpartition(".")[2] for module in modules}
    identifiers = {module.name: _names_in(module) for module in modules}
    found = []
    for module in modules:
        if not module.is_package:
            continue
        inside = [one for one in modules if f"{one.name}.".startswith(f"{module.name}.")]
        own = {part for one in inside for part in one.name.split(".")} | identifiers[module.name]
        known = own.union(*(identifiers[one.name] for one in inside)) - (last - own)
        names = _SINGLE.findall(ast.get_docstring(module.tree) or "")
        found += [f"{module.place}:1: {name} is not here" for name in names if name not in known]
    return found


def unnamed_package_members(modules: list[Module]) -> list[str]:
    """Return the sub-packages, and the modules that many others import, that their package does not name.

    The page of the whole package is ARCHITECTURE.md, which lists the rooms.
    """
    pages = {
        module.name: _words_in_code(ast.get_docstring(module.tree) or "")
        for module in modules
        if module.is_package and module.room
    }
    outside: dict[str, int] = {}
    for name, targets in import_graph(modules).items():
        for target in targets:
            if not f"{name}.".startswith(f"{target.rpartition('.')[0]}."):
                outside[target] = outside.get(target, 0) + 1
    found = []
    for module in modules:
        package, _, last = module.name.rpartition(".")
        counts = module.is_package or outside.get(module.name, 0) >= MIN_OUTSIDE_IMPORTERS
        if counts and last not in pages.get(package, {last}):
            found.append(f"{module.place}:1: the docstring of {package} does not name `{last}`")
    return found


def _words_in_code(docstring: str) -> set[str]:
    return {word for quoted in _QUOTED.findall(docstring) for word in re.findall(r"\w+", quoted)}


def stale_long_names(page: Path, modules: list[Module]) -> list[str]:
    """Return the names of three parts in a document that begin with a room and lead to no module.

    A name of two parts may be that of a setting.
    """
    known, rooms = _endings(modules), {module.room for module in modules}
    return [
        f"{page.name}: no module is named {name}"
        for name in _DOTTED.findall(page.read_text(encoding="utf-8"))
        if name.removeprefix("convoy.").count(".") > 1
        and name.removeprefix("convoy.").partition(".")[0] in rooms
        and not _leads_to_module(name, known)
    ]


def stale_paths_of_modules(modules: list[Module], root: Path) -> list[str]:
    """Return the paths of Python files in docstrings and comments that do not exist."""
    return [
        f"{place}: there is no {path}"
        for module in modules
        for place, text in _texts(module)
        for path in _stale_paths(text, root)
    ]


def stale_paths_of_page(page: Path, root: Path) -> list[str]:
    """Return the paths of Python files in a document that do not exist."""
    text = page.read_text(encoding="utf-8")
    found = [path for path in _stale_paths(text, root) if not (page.parent / path).exists()]
    return [f"{page.name}: there is no {path}" for path in found]


def _stale_paths(text: str, root: Path) -> Iterator[str]:
    for path in _PATH.findall(text):
        is_ours = path.partition("/")[0] not in _LIBRARIES
        if is_ours and not any((root / base / path).exists() for base in _BASES):
            yield path


def _endings(modules: list[Module]) -> Known:
    """Return the modules by name, and by the name without each of its first parts."""
    found: Known = {}
    for module in modules:
        parts = module.name.split(".")
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(module)
    return found


def _leads_to_module(name: str, known: Known) -> bool:
    """Return whether ``name`` is that of a module, of a definition in one, or of an export of a package.

    Names of files, and names of the API, count too.
    """
    parts = name.split(".")
    if parts[-1] in _FILE_ENDINGS or (parts[0] == "convoy" and len(parts) == 2):
        return True
    for end in range(len(parts), 1, -1):
        found = known.get(".".join(parts[:end]), [])
        if found:
            is_whole = end == len(parts)
            return is_whole or any(not one.is_package or parts[end] in _names_in(one) for one in found)
    return False


def _names_in(module: Module) -> set[str]:
    """Return the identifiers of a module, and its string constants."""
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def _texts(module: Module) -> Iterator[tuple[str, str]]:
    """Yield every docstring and comment line with its place."""
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield module.at(node), text
    for number, line in enumerate(module.lines, 1):
        if line.lstrip().startswith("#"):
            yield f"{module.place}:{number}", line
