"""Check that commits which move modules or rewrite prose change no code.

    python scripts/same_code.py BASE [NEW] [--each] [--moves FILE] [--allow-renames FILE]
                                [--allow-strings] [--allow-joins] [--under src]

BASE and NEW are commits or folders; NEW is the working tree unless it is named. With ``--each`` every commit
of BASE..NEW is compared with its parent. Modules are paired by ``--moves``, by path, by equal code, and last
by the names that they define. Two modules are the same when their syntax trees are equal but for docstrings
and comments, and when each imported name still means the same definition, wherever it lies now.

FILE holds ``old=new`` lines; ``#`` begins a comment. Moves are dotted module names, renames are identifiers.
``--allow-strings`` lists string literals that differ, and passes. A new ``hint=`` counts as one.
``--allow-joins`` takes modules that were joined or split, if their statements are the same, in any order.
Exit code 1: some module differs, and each one is printed with its first difference.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

_SHARED_NAMES = 0.5  # the least share of top-level names by which two modules are taken for one
_MAX_SHOWN = 12  # lines of a difference


@dataclass
class Tree:
    """The Python modules of one commit or folder, by dotted name."""

    modules: dict[str, ast.Module]
    places: dict[str, str]
    packages: set[str]

    def resolve(self, module: str, name: str, depth: int = 0) -> tuple[str, str]:
        """Return the module that defines ``name`` and its name there, through re-exports; "" for a module."""
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}", ""
        tree = self.modules.get(module)
        if tree is None or depth > 8:
            return module, name
        if name not in defined_names(tree):
            for target, original, local in imports_of(tree, module, module in self.packages):
                if local == name and original:
                    return self.resolve(target, original, depth + 1)
        return module, name

    def aliases(self, module: str, moved: Mapping[str, str]) -> dict[str, str]:
        """Return the module, where it lies now, behind each name under which ``module`` imports one."""
        found = {}
        for local, (target, original) in self.meanings(module).items():
            if not original and target in self.modules:
                found[local] = moved.get(target, target)
        return found

    def meanings(self, module: str) -> dict[str, tuple[str, str]]:
        """Return what each name that ``module`` imports stands for."""
        found = {}
        for target, original, local in imports_of(self.modules[module], module, module in self.packages):
            found[local] = self.resolve(target, original) if original else (target, "")
        return found


@dataclass
class Rules:
    """What may differ: ``modules`` and ``names`` map old to new."""

    modules: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    strings: bool = False
    joins: bool = False


@dataclass
class Report:
    """The outcome of one comparison."""

    same: int = 0
    moved: int = 0
    differing: list[str] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)


def imports_of(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name there or "", local name) of every import of ``tree``, also those in functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[
                : None if is_package and node.level == 1 else -max(node.level - is_package, 1)
            ]
            target = ".".join([*above, *filter(None, [node.module])]) if node.level else str(node.module)
            for alias in node.names:
                yield target, alias.name, alias.asname or alias.name


def defined_names(tree: ast.Module) -> set[str]:
    """Return the names that the top level of ``tree`` defines, imports apart."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.If | ast.Try):
            found |= {
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
    return found


class Plain(ast.NodeTransformer):
    """Rewrites a tree to what must stay: no imports, no docstrings, and identifiers by their new names."""

    def __init__(self, rules: Rules, aliases: Mapping[str, str], *, is_old: bool) -> None:
        self._names: Mapping[str, str] = rules.names if is_old else {}
        self._modules: Mapping[str, str] = rules.modules if is_old else {}
        self._aliases = aliases
        self._strings = rules.strings
        self.texts: list[str] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and name in {"body", "orelse", "finalbody"}:
                setattr(node, name, self._block(value, is_body=name == "body"))
        super().generic_visit(node)
        for name in ("id", "attr", "name", "arg", "rest"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                setattr(node, name, self._named(value, is_plain=isinstance(node, ast.Name)))
        for name in ("names", "kwd_attrs"):
            value = getattr(node, name, None)
            if isinstance(value, list) and all(isinstance(one, str) for one in value):
                setattr(node, name, [self._named(one) for one in value])
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if self._strings:
                self.texts.append(node.value)
                return ast.Constant("")
            return ast.Constant(self._modules.get(node.value, self._named(node.value)))
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        if self._strings:
            self.texts.append(ast.unparse(node))
            return ast.Constant("")
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._strings:
            hints = [key for key in node.keywords if key.arg == "hint" and _is_text(key.value)]
            self.texts += [ast.unparse(key.value) for key in hints]
            node.keywords = [key for key in node.keywords if key not in hints]
        return self.generic_visit(node)

    def _named(self, name: str, *, is_plain: bool = False) -> str:
        renamed = self._names.get(name)
        if renamed is None and is_plain:
            # A module is the same under whatever name an import gives it.
            renamed = self._aliases.get(name)
        return name if renamed is None else renamed

    @staticmethod
    def _block(statements: list[ast.stmt], *, is_body: bool) -> list[ast.stmt]:
        kept = []
        for node in statements:
            if isinstance(node, ast.Import | ast.ImportFrom) or _is_loose_text(node):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                continue
            kept.append(node)
        if is_body and len(kept) > 1:
            kept = [node for node in kept if not isinstance(node, ast.Pass)] or [ast.Pass()]
        return kept or ([ast.Pass()] if is_body else [])


def _is_loose_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def plain(tree: Tree, name: str, rules: Rules, *, is_old: bool) -> tuple[list[str], list[str]]:
    """Return the dumped top-level statements of a module and the strings that were left out of them."""
    rewriter = Plain(rules, tree.aliases(name, rules.modules if is_old else {}), is_old=is_old)
    copy = rewriter.visit(ast.parse(ast.unparse(tree.modules[name])))
    # an `__all__` is a kind of import: it says what others may import from here
    exports = {"__all__"}
    kept = [
        node
        for node in copy.body
        if not isinstance(node, ast.Pass)
        and not (isinstance(node, ast.Assign) and {ast.unparse(target) for target in node.targets} <= exports)
    ]
    return [ast.dump(node) for node in kept], rewriter.texts


def pair(old: Tree, new: Tree, rules: Rules) -> dict[str, str]:
    """Return the new module of each old one that has one; several old ones may share a new one."""
    found = {name: target for name, target in rules.modules.items() if name in old.modules}
    found |= {name: name for name in old.modules if name in new.modules and name not in found}
    taken = set(found.values())
    rest = [name for name in old.modules if name not in found]
    free = [name for name in new.modules if name not in taken]
    by_code = {_code(new, name, rules, is_old=False): name for name in free if rest}
    for name in rest:
        code = _code(old, name, rules, is_old=True)
        if code.strip() and code in by_code:
            found[name] = by_code[code]
    free = [name for name in free if name not in set(found.values())]
    for name in [name for name in rest if name not in found]:
        mine = {rules.names.get(one, one) for one in defined_names(old.modules[name])}
        scored = [(_share(mine, defined_names(new.modules[other])), other) for other in free]
        best, other = max(scored, default=(0.0, ""))
        if best >= _SHARED_NAMES:
            found[name] = other
    return found


def _code(tree: Tree, name: str, rules: Rules, *, is_old: bool) -> str:
    return "\n".join(plain(tree, name, rules, is_old=is_old)[0])


def _share(mine: set[str], other: set[str]) -> float:
    return len(mine & other) / max(1, len(mine | other))


def compare(old: Tree, new: Tree, rules: Rules) -> Report:
    """Compare two trees by ``rules``."""
    pairs = pair(old, new, rules)
    moved = {old_name: new_name for old_name, new_name in pairs.items() if old_name != new_name}
    rules = replace(rules, modules=moved | rules.modules)
    report = Report(moved=sum(o != n for o, n in pairs.items()))
    sources: dict[str, list[str]] = {name: [] for name in new.modules}
    loose_old: list[str] = []
    loose_new: list[str] = []
    problems: list[str] = []
    for name in old.modules:
        if name in pairs and pairs[name] in sources:
            sources[pairs[name]].append(name)
        else:
            statements = plain(old, name, rules, is_old=True)[0]
            loose_old += statements
            if statements:
                problems.append(f"{old.places[name]}: has no module in the new tree")
    for name, olds in sources.items():
        was: list[str] = []
        texts: list[str] = []
        for one in olds:
            statements, said = plain(old, one, rules, is_old=True)
            was, texts = was + statements, texts + said
        now, new_texts = plain(new, name, rules, is_old=False)
        report.strings += _changed_texts(new.places[name], texts, new_texts)
        changes = _changed_imports(old, new, olds, name, rules)
        report.differing += [f"{new.places[name]}: {change}" for change in changes]
        if was == now:
            report.same += 1
            continue
        loose_old, loose_new = loose_old + was, loose_new + now
        problems.append(f"{new.places[name]}: {_first_difference(was, now, olds)}")
    # sets, because joined modules need a `_log` or a type variable once
    is_same_bag = set(loose_old) == set(loose_new)
    if not (rules.joins and is_same_bag):
        report.differing += problems
    return report


def _changed_texts(place: str, old: list[str], new: list[str]) -> list[str]:
    gone, came = Counter(old) - Counter(new), Counter(new) - Counter(old)
    return [f"{place}: - {text!r}" for text in gone] + [f"{place}: + {text!r}" for text in came]


def _changed_imports(old: Tree, new: Tree, olds: list[str], name: str, rules: Rules) -> list[str]:
    """Return the names that both import and that stand for another definition now."""
    now = new.meanings(name)
    found = []
    for one in olds:
        for local, (module, original) in old.meanings(one).items():
            wanted = (rules.modules.get(module, module), rules.names.get(original, original))
            wanted = new.resolve(*wanted) if wanted[1] else wanted
            there = now.get(rules.names.get(local, local))
            if there is not None and there != wanted and there[1] and module.split(".")[0] == "convoy":
                found.append(f"imports {'.'.join(filter(None, there))} where it imported {module}.{original}")
    return found


def _first_difference(was: list[str], now: list[str], olds: list[str]) -> str:
    if not olds:
        return "is new" if now else "is new and empty"
    for index, (one, other) in enumerate(zip(was, now, strict=False)):
        if one != other:
            return f"statement {index + 1} differs\n{_shown(one, other)}"
    return f"has {len(now)} statements, and {len(was)} before"


def _shown(one: str, other: str) -> str:
    left, right = ([part.strip() for part in text.replace("(", "(\n").split("\n")] for text in (one, other))
    lines = list(difflib.unified_diff(left, right, lineterm="", n=1))[3:]
    return "\n".join(f"      {line}" for line in lines[:_MAX_SHOWN])


def read_tree(where: str, under: str) -> Tree:
    """Return the modules of a commit, or of a folder. Raises SystemExit for neither."""
    files = dict(_folder(Path(where), under) if Path(where).is_dir() else _commit(where, under))
    tree = Tree({}, {}, set())
    for path, text in files.items():
        parts = list(Path(path).relative_to(under).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        tree.modules[name] = ast.parse(text)
        tree.places[name] = path
        if is_package:
            tree.packages.add(name)
    return tree


def _folder(root: Path, under: str) -> Iterator[tuple[str, str]]:
    for path in sorted((root / under).rglob("*.py")):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def _commit(name: str, under: str) -> Iterator[tuple[str, str]]:
    done = subprocess.run(["git", "archive", name, "--", under], capture_output=True, check=False)  # noqa: S607
    if done.returncode:
        raise SystemExit(
            f"error: {name} is no folder and no commit with {under}/: {done.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (data := archive.extractfile(member)) is not None:
                yield member.name, data.read().decode()


def read_pairs(path: Path | None) -> dict[str, str]:
    """Return the ``old=new`` lines of a file."""
    lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    kept = [line.partition("#")[0].strip() for line in lines]
    return {old.strip(): new.strip() for old, _, new in (line.partition("=") for line in kept if "=" in line)}


def _show(title: str, report: Report, say: Callable[[str], None]) -> bool:
    for line in (*report.strings, *report.differing):
        say(f"  {line}")
    say(
        f"{title}: {report.same} modules with the same code, {report.moved} moved, "
        f"{len(report.strings)} strings changed, {len(report.differing)} differences"
    )
    return not report.differing


def _steps(base: str, new: str) -> Iterable[tuple[str, str]]:
    done = subprocess.run(
        ["git", "rev-list", "--reverse", "--first-parent", f"{base}..{new}"],  # noqa: S607
        capture_output=True,
        check=True,
        text=True,
    )
    return ((f"{commit}^", commit) for commit in done.stdout.split())


def main(arguments: list[str] | None = None) -> int:
    """Compare what the command line names; 1 where code differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("new", nargs="?", default=".")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--moves", type=Path)
    parser.add_argument("--allow-renames", type=Path)
    parser.add_argument("--allow-strings", action="store_true")
    parser.add_argument("--allow-joins", action="store_true")
    parser.add_argument("--under", default="src")
    given = parser.parse_args(arguments)
    moves, names = read_pairs(given.moves), read_pairs(given.allow_renames)
    rules = Rules(moves, names, given.allow_strings, given.allow_joins)
    steps = _steps(given.base, "HEAD" if given.new == "." else given.new) if given.each else None
    results = [
        _show(new[:12], compare(read_tree(old, given.under), read_tree(new, given.under), rules), print)
        for old, new in steps or [(given.base, given.new)]
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
