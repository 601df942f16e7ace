"""The rules about a file by itself: its size, its names and the calls that are banned here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from architecture.source import Module, import_graph, imports_of

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 50
MAX_PACKAGE_MODULES = 12
MAX_VERBS = 25
MIN_PACKAGE_LINES, MAX_PACKAGE_LINES = 3, 10
MIN_SHARED_LINES = 60
BANNED_WORDS = frozenset({"util", "utils", "misc"})
UNSAFE_PACKAGES = frozenset(["pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"])
UNSAFE_CALLS = frozenset({"eval", "exec"})
UNSAFE_ATTRIBUTES = {
    "create_default_context": "it honours SSLKEYLOGFILE: make a context of our own",
    "_create_unverified_context": "every link is authenticated",
}
TEXT_SUFFIXES = frozenset(
    {"", ".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".jinja", ".html", ".js", ".css"}
)
_CLASS_NAME = re.compile(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`")
_APART = re.compile(r"\bapart\b", re.I)
# Written in two halves, so that this file does not break its own rule.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:" + "|".join(("wo" + "rk", "ro" + "ot")) + ")/")


def long_modules(modules: list[Module]) -> list[str]:
    """Return modules over the limit of lines."""
    return [
        f"{module.place}:1: {len(module.lines)} lines, and {MAX_MODULE_LINES} is the limit"
        for module in modules
        if len(module.lines) > MAX_MODULE_LINES
    ]


def crowded_packages(modules: list[Module]) -> list[str]:
    """Return the packages with more modules beside their sub-packages than a reader takes in at once."""
    packages = {module.name for module in modules if module.is_package}
    found = []
    for package in sorted(packages):
        beside = [
            module.name
            for module in modules
            if not module.is_package and module.name.rpartition(".")[0] == package
        ]
        most = MAX_VERBS if package == "convoy.cli" else MAX_PACKAGE_MODULES
        if len(beside) > most:
            found.append(f"{package}: {len(beside)} modules, and {most} is the limit")
    return found


def silent_packages(modules: list[Module]) -> list[str]:
    """Return the packages with a docstring that does not list their contents in 3 to 10 lines."""
    found = []
    for module in modules:
        if not module.is_package:
            continue
        lines = [line for line in (ast.get_docstring(module.tree) or "").splitlines() if line.strip()]
        if not MIN_PACKAGE_LINES <= len(lines) <= MAX_PACKAGE_LINES:
            wanted = f"{MIN_PACKAGE_LINES} to {MAX_PACKAGE_LINES}"
            found.append(f"{module.place}:1: say what is inside in {wanted} lines, not {len(lines)}")
    return found


def stale_package_names(modules: list[Module]) -> list[str]:
    """Return the classes that a package's docstring names in backticks, and that no module defines."""
    classes = {node.name for module in modules for node in module.nodes if isinstance(node, ast.ClassDef)}
    return [
        f"{module.place}:1: no class is named {name}"
        for module in modules
        if module.is_package
        for name in _CLASS_NAME.findall(ast.get_docstring(module.tree) or "")
        if name not in classes
    ]


def unexplained_small_modules(modules: list[Module]) -> list[tuple[str, str]]:
    """Return small modules that one neighbour alone imports, as (room, violation).

    Such a module is joined to its importer, or its docstring says why it is apart, with that word.
    """
    importers: dict[str, set[str]] = {}
    for name, edges in import_graph(modules).items():
        for target in edges:
            importers.setdefault(target, set()).add(name)
    found = []
    for module in modules:
        package = module.name.rpartition(".")[0]
        only = [name for name in importers.get(module.name, ()) if name != module.name]
        is_small = not module.is_package and len(module.lines) < MIN_SHARED_LINES
        is_explained = _APART.search(ast.get_docstring(module.tree) or "") is not None
        if is_small and not is_explained and len(only) == 1 and only[0].rpartition(".")[0] == package:
            text = f"{len(module.lines)} lines, for {only[0]} alone: join them, or say why it is apart"
            found.append((module.room, f"{module.place}:1: {text}"))
    return found


def long_functions(modules: list[Module]) -> list[str]:
    """Return functions over the limit, docstring and decorators apart."""
    found = []
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
                if num_lines > MAX_FUNCTION_LINES:
                    text = f"{node.name} has {num_lines} lines, and {MAX_FUNCTION_LINES} is the limit"
                    found.append(f"{module.at(node)}: {text}")
    return found


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def banned_names(modules: list[Module]) -> list[str]:
    """Return modules and classes with a name that says nothing about their subject."""
    found = []
    for module in modules:
        for part in module.name.split("."):
            words = set(part.lower().split("_")) & BANNED_WORDS
            found += [f"{module.place}:1: a module is named {part!r}: say what it holds" for _ in words]
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                words = {
                    word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", node.name)
                } & BANNED_WORDS
                found += [f"{module.at(node)}: class {node.name}: say what it does" for _ in words]
    return found


def repeated_class_names(modules: list[Module]) -> list[str]:
    """Return the public class names that two modules use, with their places: one word must mean one thing."""
    found: dict[str, list[str]] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module.at(node))
    return [
        f"class {name}: " + ", ".join(sorted(places))
        for name, places in sorted(found.items())
        if len(places) > 1
    ]


def asking_methods(modules: list[Module]) -> list[str]:
    """Return the functions named ``takes``: the handler of a frame stands in a table, so none asks around."""
    return [
        f"{module.at(node)}: a row of `cluster.handlers` names the handler of a frame"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.FunctionDef) and node.name == "takes"
    ]


def stray_frame_types(modules: list[Module]) -> list[str]:
    """Return the places that name the frame type of a message outside its class, which has the row.

    Frames of tensors and of the handshake have no class, so their types may stand where they are handled.
    """
    found = []
    for module in modules:
        for node in module.nodes:
            is_named = isinstance(node, ast.Attribute) and _is_attribute(node, "FrameType", {node.attr})
            if not is_named or module.name.startswith("convoy.wire.messages."):
                continue
            assert isinstance(node, ast.Attribute)
            if node.attr not in {"HIDDEN", "BLOCKS", "PARTIAL", "OPENING"} and "HANDSHAKE" not in node.attr:
                found.append(f"{module.at(node)}: FrameType.{node.attr}: its class has it as `frame.type`")
    return found


def prints(modules: list[Module]) -> list[str]:
    """Return calls of print, and writes to the standard streams, outside cli/."""
    found = []
    for module in modules:
        if module.room in {"cli", "__main__"}:
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(f"{module.at(node)}: print outside cli/")
            elif _is_attribute(node, "sys", {"stdout", "stderr"}):
                found.append(f"{module.at(node)}: a standard stream outside cli/")
    return found


def unsafe_code(modules: list[Module]) -> list[str]:
    """Return code that runs the text of a file or a peer, and TLS contexts that we did not make."""
    found = []
    for module in modules:
        for item in imports_of(module):
            if item.target in UNSAFE_PACKAGES:
                found.append(f"{module.place}:{item.line}: {item.target} runs what it reads")
        for node in module.nodes:
            found += [f"{module.at(node)}: {reason}" for reason in _unsafe(node)]
    return found


def _unsafe(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            yield f"{node.func.id} runs what it is given"
        if _is_attribute(node.func, "torch", {"load"}):
            yield "torch.load unpickles: read safetensors"
        for keyword in node.keywords:
            allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "trust_remote_code" and not allowed:
                yield "trust_remote_code may only ever be False"
    elif isinstance(node, ast.Attribute) and node.attr in UNSAFE_ATTRIBUTES:
        yield f"{node.attr}: {UNSAFE_ATTRIBUTES[node.attr]}"


def unresolved_types(modules: list[Module]) -> list[str]:
    """Return types that msgspec meets first in a function: a second thread could use them half known."""
    return [
        f"{module.at(node)}: msgspec meets a type here: resolved(...) of convoy.config.type_resolution"
        for module in modules
        if module.name != "convoy.config.type_resolution"
        for function in module.nodes
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and _meets_a_type(node)
    ]


def _meets_a_type(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or not ast.unparse(call.func).startswith("msgspec."):
        return False
    types = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
    match call.func.attr:
        case "convert":
            types += call.args[1:2]
        case "Decoder":
            types += call.args[:1]
        case "decode":
            pass
        case _:
            return False
    return not all(_is_builtin_or_resolved(type_) for type_ in types)


def _is_builtin_or_resolved(type_: ast.expr) -> bool:
    if isinstance(type_, ast.Call):
        return isinstance(type_.func, ast.Name) and type_.func.id == "resolved"
    return ast.unparse(type_) in {"dict[str, Any]", "dict[str, int]", "Any"}


def environment_reads(modules: list[Module]) -> list[str]:
    """Return reads of environment variables outside cli/ and config/: commands and file places use them."""
    return [
        f"{module.at(node)}: environment variables are read in cli/ and config/ alone"
        for module in modules
        if module.room not in {"cli", "config", "__main__"}
        for node in module.nodes
        if _is_attribute(node, "os", {"environ", "getenv", "putenv"})
    ]


def _is_attribute(node: ast.AST, owner: str, names: set[str]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    )


def machine_paths(files: list[Path], root: Path) -> list[str]:
    """Return absolute paths of some machine in a text file."""
    found = []
    for path in files:
        if path.suffix not in TEXT_SUFFIXES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not a text file
        for number, line in enumerate(text.splitlines(), start=1):
            if match := MACHINE_PATH.search(line):
                found.append(
                    f"{path.relative_to(root).as_posix()}:{number}: {match.group()} is a machine's own path"
                )
    return found
