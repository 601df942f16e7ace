"""Collect the facts of one side for `scripts/frozen.py`, with PYTHONPATH on that side's src and tests.

Most facts come from the command line, from HTTP and from files, so they need no names of modules. Classes
that are needed are found by name, wherever they lie: see `Side.locate`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import json
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import frozen_scene

Facts = dict[str, Any]
KERNELS = ("exact-f32", "plain-f32", "w8a8", "w4a16")
_NUM_TOKENS = 3  # decoded behind each prompt
_CHUNK = 16


class Side:
    """The tree of one side, and the names that definitions have in it."""

    def __init__(self, root: Path, names: Mapping[str, str]) -> None:
        self.root = root
        self._names = names
        self._index: dict[str, list[str]] = {}
        for base in (root / "src", root / "tests" / "support"):
            for path in sorted(base.rglob("*.py")):
                start = root / "src" if base.name == "src" else root / "tests"
                parts = path.relative_to(start).with_suffix("").parts
                module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                for name in _defined(ast.parse(path.read_text(encoding="utf-8"))):
                    self._index.setdefault(name, []).append(module)

    def module(self, name: str) -> Any:
        """Import the module that was ``name`` in the frozen tree."""
        return importlib.import_module(self._names.get(name, name))

    def locate(self, name: str, near: str = "") -> Any:
        """Return the definition that was ``name`` in the frozen tree; it may be mapped to module:name().

        ``near`` is a part of its module's name, where several modules define the name. Raises LookupError.
        """
        found = self._names.get(f"{near}:{name}", self._names.get(name, name))
        module, _, member = found.rpartition(":")
        if not module:
            modules = self._index.get(member, [])
            modules = [one for one in modules if near in one] or modules
            if len(modules) != 1:
                raise LookupError(
                    f"{name} is defined in {modules or 'no module'}: map it in frozen_names.toml"
                )
            module = modules[0]
        value = getattr(importlib.import_module(module), member.removesuffix("()"))
        return value() if member.endswith("()") else value


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


# Wire.


def wire(side: Side) -> Facts:
    """Return every message's fields and bytes, the numbers and limits of frames, and constants and labels."""
    sample = _samples()
    facts: Facts = {}
    kinds = side.locate("FrameType")
    facts |= {f"frame type {kind.name}": int(kind) for kind in kinds}
    for name in ("MAX_PAYLOAD_BYTES", "MAX_HANDSHAKE_BYTES", "MAX_BODY_BYTES"):
        facts |= {f"{name} {kind.name}": limit for kind, limit in side.locate(name).items()}
    for name in ("EnrolmentType", "Refusal"):
        facts |= {f"{name} {kind.name}": int(kind) for kind in side.locate(name, "wire")}
    for kind, message in side.locate("MESSAGE_TYPES").items():
        facts |= _message(sample, f"link 0x{int(kind):02x}", message)
    for union in ("FromProvider", "FromCoordinator"):
        for message in get_args(side.locate(union)):
            facts |= _message(sample, f"{union} {message.__struct_config__.tag}", message)
    for name in ("ProviderCertificate", "ProviderEvidence", "Claims"):
        facts |= _message(sample, name, side.locate(name, "wire"))
    facts |= _literals(side.root)
    return facts


def _message(sample: Any, title: str, kind: type[Any]) -> Facts:
    import msgspec

    config = kind.__struct_config__
    facts: Facts = {
        f"{title}: form": [config.tag, config.tag_field, config.array_like, config.forbid_unknown_fields],
        f"{title}: fields": _fields(kind),
    }
    for optional in (True, False):
        made = sample(kind, optional=optional)
        facts[f"{title}: bytes, {'all' if optional else 'required'}"] = msgspec.msgpack.encode(made).hex()
    return facts


def _fields(kind: type[Any]) -> list[str]:
    """Return name, type and default of each field, structs within it included."""
    from msgspec import NODEFAULT, inspect

    found = []
    described: Any = inspect.type_info(kind)
    for field in described.fields:
        default = "" if field.default is NODEFAULT else f" = {field.default!r}"
        if field.default_factory is not NODEFAULT:
            default = f" = {field.default_factory()!r}"
        found.append(f"{field.encode_name}: {_type_text(field.type)}{default}")
    return found


def _type_text(kind: Any, depth: int = 0) -> str:
    """Return a type as text without the name of a class of ours."""
    from msgspec import inspect

    name = type(kind).__name__.removesuffix("Type")
    parts: list[str] = []
    if isinstance(kind, inspect.StructType) and depth < 6:
        parts = [f"{one.encode_name}: {_type_text(one.type, depth + 1)}" for one in kind.fields]
    for key in kind.__struct_fields__:
        value = getattr(kind, key)
        if isinstance(value, inspect.Type):
            parts.append(_type_text(value, depth + 1))
        elif key in {"types", "item_types"}:
            parts += [_type_text(one, depth + 1) for one in value]
        elif key not in {"cls", "fields"} and value is not None:
            parts.append(f"{key}={value}")
    return f"{name}({', '.join(parts)})" if parts else name


def _literals(root: Path) -> Facts:
    """Return every bytes literal of four or more bytes: labels of signatures, and magic numbers."""
    found = set()
    for path in (root / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, bytes) and len(node.value) >= 4:
                found.add(node.value)
    return {f"bytes literal {one!r}": True for one in found}


def _samples() -> Any:
    path = Path(__file__).resolve().parents[1] / "tests" / "support" / "sample_values.py"
    spec = importlib.util.spec_from_file_location("frozen_sample_values", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.sample


# Frames.


def frames(side: Side) -> Facts:
    """Return encoded headers, sealed frames, and the handshake that follows from the recorded one."""
    facts: Facts = {}
    encode = side.locate("encode_header_into")
    for kind in side.locate("MAX_PAYLOAD_BYTES"):
        buffer = bytearray(48)
        fields = (kind, 1, 3, 77, b"cluster!", 5, 1 << 40, 6, 7, 8)
        encode(buffer, 0, fields)
        facts[f"header {kind.name}"] = buffer.hex()
    encode_preamble = side.locate("encode_handshake")
    for kind in side.locate("MAX_HANDSHAKE_BYTES"):
        facts[f"handshake frame {kind.name}"] = encode_preamble(kind, b"payload").hex()
    sealer_class, limits = side.locate("Sealer", "crypto"), side.locate("KeyLimits", "crypto")
    for cipher in side.locate("Cipher"):
        sealer = sealer_class(bytes(range(32)), cipher, limits(max_records=2))
        for number in range(5):
            text = bytes([number]) * (9 * number)
            out = bytearray(len(text) + 16)
            sealer.seal_into(bytes([number]) * 48, text, memoryview(out))
            facts[f"sealed {cipher.name} {number}"] = out.hex()
    facts["limits of a key"] = [limits().max_records, limits().max_bytes]
    facts |= _handshake(side)
    vectors = side.root / "tests" / "vectors"
    facts |= {f"vectors {path.name}": _digest(path.read_bytes()) for path in vectors.glob("*.json")}
    return facts


def _handshake(side: Side) -> Facts:
    """Return both sides' messages with the responder's recorded one, whose randomness cannot be repeated."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    vectors = importlib.import_module("vectors.generate_handshake")
    recorded = json.loads((side.root / "tests" / "vectors" / "handshake_v1.json").read_text(encoding="utf-8"))
    seed = vectors.seed
    ephemeral = side.locate("Ephemeral")(
        X25519PrivateKey.from_private_bytes(seed("initiator x25519")),
        MLKEM768PrivateKey.from_seed_bytes(seed("initiator mlkem", 64)),
    )
    sign = Ed25519PrivateKey.from_private_bytes(seed("alpha")).sign
    initiator = side.locate("Initiator", "handshake")(vectors.context(), sign, vectors.BOTH, ephemeral)
    facts: Facts = {"message 1": initiator.create_1().hex()}
    initiator.consume_2(bytes.fromhex(recorded["message_2"]))
    message_3, secrets = initiator.create_3()
    return facts | {
        "message 3": message_3.hex(),
        "secrets": [bytes(one).hex() for one in (secrets.send, secrets.receive, secrets.transcript)],
        "binding": secrets.binding.hex(),
        "cipher": secrets.cipher.name,
    }


# Command line, files and JSON types.


def cli(side: Side) -> Facts:
    """Return every command with its arguments and options, their types and defaults, and exit codes."""
    import typer

    facts: Facts = {}
    root: Any = typer.main.get_command(side.module("convoy.cli.main").app)
    todo: list[tuple[str, Any]] = [("convoy", root)]
    while todo:
        path, command = todo.pop()
        facts[f"{path}"] = ["command", bool(command.hidden)]
        for one in command.params:
            annotation = one.type_descriptor.annotation
            named = annotation.__name__ if isinstance(annotation, type) else str(annotation)
            kind = [one.param_type_name, named, str(one.nargs), bool(one.multiple), bool(one.hidden)]
            limits = [one.min, one.max]
            default = one.default() if callable(one.default) else one.default
            shown = [repr(default) if not isinstance(default, Path) else str(default), one.required]
            names = [*one.opts, *one.secondary_opts]
            facts[f"{path} {' '.join(names)}"] = [*kind, *map(str, limits), *shown, one.envvar]
        todo += [(f"{path} {name}", sub) for name, sub in getattr(command, "commands", {}).items()]
    exit_code, answer_for = side.locate("exit_code", "cli"), side.locate("answer_for", "problem")
    for error in _error_classes(side):
        try:
            made = error("x")
        except (TypeError, AttributeError):
            # It takes other arguments than a text. Its class is what counts.
            made = error.__new__(error, "x")
        answer = answer_for(made)
        about = [exit_code(made), answer.status, answer.type, answer.code]
        facts[f"error {error.__name__}"] = [*about, [base.__name__ for base in error.__mro__[:-3]]]
    return facts


def _error_classes(side: Side) -> list[Any]:
    found = [side.module("convoy.errors").ConvoyError]
    for error in found:
        found += [one for one in error.__subclasses__() if one not in found]
    return found


_SKIPPED = ("convoy.bench", "convoy.model", "convoy.__main__")
_NO_MODULES = ".migrations."  # programs of alembic


def types(_side: Side) -> Facts:
    """Return the fields of every JSON and TOML type: requests, answers, status, reports and configuration."""
    import msgspec

    convoy = importlib.import_module("convoy")
    for module in pkgutil.walk_packages(convoy.__path__, "convoy."):
        if not module.name.startswith(_SKIPPED) and _NO_MODULES not in module.name:
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if str(error.name).startswith("convoy"):
                    raise  # an extra that is not installed, such as triton, is missing on both sides
    found: dict[str, list[list[str]]] = {}
    todo: list[Any] = [msgspec.Struct]
    for kind in todo:
        todo += [one for one in kind.__subclasses__() if one not in todo]
        config = kind.__struct_config__ if kind is not msgspec.Struct else None
        if config is not None and not config.array_like and kind.__module__.startswith("convoy"):
            # by its fields and not by its name, which is no fact
            title = f"type of {', '.join(kind.__struct_fields__[:3])}"
            fields = [_plain_default(one) for one in _fields(kind)]
            form = [f"omits defaults: {config.omit_defaults}", f"strict: {config.forbid_unknown_fields}"]
            found.setdefault(title, []).append([*form, *fields])
    return {title: sorted(several) for title, several in found.items()}


def _plain_default(text: str) -> str:
    """Return a field's text without the name of the class of its default."""
    name, equals, default = text.partition(" = ")
    if "(" in default and default[:1].isupper():
        default = default[default.index("(") :]
    return f"{name}{equals}{default}"


def files(side: Side) -> Facts:
    """Return the bytes of files that hold no random numbers, and the form of those that do."""
    from dataclasses import fields as fields_of

    facts = frozen_scene.written_files(side.root)
    envelope = side.locate("seal_key", "crypto")
    cost = side.locate("ScryptCost")(10, 8, 1)
    sealed = envelope(bytes(range(32)), "a passphrase", salt=bytes(16), nonce=bytes(12), cost=cost)
    facts["key envelope"] = sealed.hex()
    facts["scrypt"] = str(side.locate("COST", "crypto"))
    source = side.locate("ModelSource")
    for model in ("demo", "demo-mini"):
        found = source.resolve(model)
        facts[f"digest of {model}"] = found.digest
    params = side.locate("SamplingParams")
    facts["sampling parameters"] = [
        f"{one.name} = {getattr(params(), one.name)!r}" for one in fields_of(params)
    ]
    return facts


# Logits.


def make_models(side: Side, folder: Path) -> None:
    """Write a tiny model of every family into ``folder``, which both sides read."""
    support = importlib.import_module("support.tiny_models")
    models = support.Models(folder)
    made = {kind: str(models.directory(kind)) for kind in support.KINDS}
    (folder / "kinds.json").write_text(json.dumps(made), encoding="utf-8")
    del side


def logits(side: Side, folder: Path) -> Facts:
    """Return digests of the logits of every family, kernel and cut, in one piece, chunks and batches."""
    import torch

    torch.set_num_threads(1)
    kinds = json.loads((folder / "kinds.json").read_text(encoding="utf-8"))
    facts: Facts = {}
    for kind, path in {**kinds, "demo-mini": "demo-mini"}.items():
        source = side.locate("ModelSource").resolve(path)
        prompts = side.locate("draw_prompts", "evaluate")(source.spec, 2, _NUM_TOKENS)
        every = [side.locate("whole", "evaluate")(source.spec), *side.locate("layouts")(source.spec, None)]
        for kernel in KERNELS:
            # cuts are the same for all kernels: the others need no more than one of each size
            chosen = every if kernel == KERNELS[0] else [every[0], every[min(1, len(every) - 1)], every[-1]]
            for layout in chosen:
                title = f"{kind} {kernel} {side.locate('layout_text')(source.spec, layout)}"
                facts |= _logits_of(side, source, layout, kernel=kernel, prompts=prompts, title=title)
        print(f"{kind}: {len(facts)} digests", file=sys.stderr, flush=True)
    return facts


def _logits_of(
    side: Side, source: Any, layout: Any, *, kernel: str, prompts: Sequence[Sequence[int]], title: str
) -> Facts:
    options = side.locate("StageOptions")(kernel=kernel, captured=False, num_threads=1, require_tags=False)
    load = side.locate("load_stage", "evaluate")
    try:
        stages = [load(source, part, options, None) for part in layout]
    except side.module("convoy.errors").ConvoyError as error:
        return {title: f"refused: {type(error).__name__}"}
    lengths = [len(prompt) + _NUM_TOKENS for prompt in prompts]
    chain = side.locate("StageChain")(source.spec, stages, lengths)
    facts: Facts = {}
    ways: list[Callable[[], Any]] = [
        lambda: side.locate("alone", "evaluate")(chain, prompts, _NUM_TOKENS),
        lambda: side.locate("chunked", "evaluate")(chain, prompts, _CHUNK),
        lambda: side.locate("batched", "evaluate")(chain, prompts, _NUM_TOKENS),
    ]
    for way in ways:
        for run in way():
            digest = _digest(run.logits.contiguous().numpy().tobytes())
            facts[f"{title} {run.way} {run.prompt} at {run.start}"] = [digest, list(run.tokens)]
    return facts


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


KINDS: dict[str, Callable[[Side], Facts]] = {
    "wire": wire,
    "frames": frames,
    "cli": cli,
    "types": types,
    "files": files,
}


def main() -> int:
    """Write the facts of the kinds that the command line names to --out, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--names", type=json.loads, default={})
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    side = Side(given.root, given.names)
    convoy = importlib.import_module("convoy")
    assert Path(str(convoy.__file__)).is_relative_to(given.root), f"{convoy.__file__} is not of this side"
    found: dict[str, Any] = {}
    for kind in given.kinds:
        try:
            if kind == "models":
                make_models(side, given.models)
            elif kind == "logits":
                found[kind] = logits(side, given.models)
            elif kind == "served":
                found |= frozen_scene.served_facts(given.root)
            else:
                found[kind] = KINDS[kind](side)
        except Exception:  # noqa: BLE001 - what a side cannot tell is a fact too, and fails the comparison
            failed = {"the probe failed": traceback.format_exc()}
            found |= {"http": failed, "metrics": failed} if kind == "served" else {kind: failed}
    given.out.write_text(json.dumps(found, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
