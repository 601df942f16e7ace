"""The rules about interfaces: stages and executors are known by their Protocols alone, without casts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from architecture.source import Module


@dataclass(frozen=True)
class Interface:
    """Describe a Protocol of the package. A class with all methods of ``marks`` must implement it whole."""

    module: str
    name: str
    marks: frozenset[str]


INTERFACES = (
    Interface("convoy.model.stage", "Stage", frozenset({"run", "select", "make_pools"})),
    Interface("convoy.engine.run.executor", "Executor", frozenset({"submit", "collect", "read_blocks"})),
)


@dataclass(frozen=True)
class _Class:
    module: Module
    node: ast.ClassDef

    @property
    def package(self) -> str:
        return self.module.name.rpartition(".")[0]

    @property
    def bases(self) -> list[str]:
        return [name for base in self.node.bases for name in _names(base)[:1]]


def casts_to_own_classes(modules: list[Module]) -> list[str]:
    """Return calls of `cast` to a class of the package: a Protocol or a variable's other type is right."""
    own = _classes(modules)
    return [
        f"{module.at(node)}: cast to {name}"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Call) and node.args and _called(node) == "cast"
        for name in _names(node.args[0])
        if name in own
    ]


def concrete_checks(modules: list[Module]) -> list[str]:
    """Return checks for a class of stage or executor outside its package: its user asks a member instead."""
    classes = _classes(modules)
    concrete = {name for interface in INTERFACES for name in _implementers(classes, interface)}
    found = []
    for module in modules:
        for node in module.nodes:
            for name in sorted(concrete.intersection(_checked_classes(node))):
                package = classes[name].package
                if not f"{module.name}.".startswith(f"{package}."):
                    found.append(f"{module.at(node)}: a check for {name}, which is {package}'s own")
    return found


def incomplete_classes(modules: list[Module]) -> list[str]:
    """Return stages and executors that lack members of their Protocol."""
    classes = _classes(modules)
    found = []
    for interface in INTERFACES:
        protocol = classes.get(interface.name)
        if protocol is None or protocol.module.name != interface.module:
            continue
        wanted = _members(protocol.node)
        for name in sorted(_implementers(classes, interface)):
            one = classes[name]
            for missing in sorted(wanted - _all_members(classes, name)):
                found.append(f"{one.module.at(one.node)}: {name} has no {missing}, as {interface.name} has")
    return found


def _classes(modules: list[Module]) -> dict[str, _Class]:
    return {
        node.name: _Class(module, node)
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }


def _implementers(classes: dict[str, _Class], interface: Interface) -> list[str]:
    return [
        name
        for name, one in classes.items()
        if "Protocol" not in one.bases and interface.marks <= _all_members(classes, name)
    ]


def _all_members(classes: dict[str, _Class], name: str) -> set[str]:
    """Return the members of a class and of its bases in the package, those of a Protocol apart."""
    one = classes.get(name)
    if one is None or "Protocol" in one.bases:
        return set()
    return _members(one.node).union(*(_all_members(classes, base) for base in one.bases if base != name))


def _members(node: ast.ClassDef) -> set[str]:
    """Return the public methods and attributes of a class body, and those that its `__init__` assigns."""
    found: set[str] = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            found.add(item.name)
            if item.name == "__init__":
                found.update(_assigned_to_self(item))
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.add(item.target.id)
        elif isinstance(item, ast.Assign):
            found.update(target.id for target in item.targets if isinstance(target, ast.Name))
    return {name for name in found if not name.startswith("_")}


def _assigned_to_self(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            owner = target.value if isinstance(target, ast.Attribute) else None
            if isinstance(target, ast.Attribute) and isinstance(owner, ast.Name) and owner.id == "self":
                yield target.attr


def _checked_classes(node: ast.AST) -> set[str]:
    """Return the names of the classes that a node compares a value's class with."""
    if isinstance(node, ast.Call) and len(node.args) > 1 and _called(node) in {"isinstance", "issubclass"}:
        return set(_names(node.args[1]))
    if isinstance(node, ast.MatchClass):
        return set(_names(node.cls))
    is_type = (
        isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and _called(node.left) == "type"
    )
    if isinstance(node, ast.Compare) and is_type:
        return {name for other in node.comparators for name in _names(other)}
    return set()


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _names(node: ast.AST) -> list[str]:
    """Return the names in an expression of types, those in a string too, outermost first."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval")
    return [
        part.id if isinstance(part, ast.Name) else part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
    ]
