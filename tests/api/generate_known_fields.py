"""Makes `src/convoy/api/body/known_fields.py` from the sources of other servers and of OpenAI's client.

    pip download --no-deps --only-binary :all: vllm && unzip vllm-*.whl -d VLLM
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    python tests/api/generate_known_fields.py VLLM llama_cpp_python-VERSION SITE_PACKAGES_WITH_OPENAI

Nothing of these packages is run: Python is parsed, and C++ is searched for the names that are read from a
body.

The table is of chats and completions alone, where clients of three servers meet. vLLM and llama.cpp, which
also define embeddings, are downloaded for one run and not installed, so no test could hold a larger table to
them. `api.openai.embeddings` and `api.ollama.translate` list the few fields that they refuse themselves.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "src/convoy/api/body/known_fields.py"
LLAMA = "vendor/llama.cpp/tools/server"
# The completion schema, then what the endpoints read of a body before it comes to the schema.
LLAMA_PATTERNS = {
    "server-schema.cpp": (
        r'(?<!add_subfield\()\(new field_\w+\("([^"]+)"',
        r'add_alias\("([^"]+)"',
        r'json_value\(data, *"([^"]+)"',
    ),
    "server-common.cpp": (
        r'\bbody(?:\.at|\.contains)?\((?:body, )?"([^"]+)"',
        r'json_value\(body, *"([^"]+)"',
    ),
    "server-context.cpp": (r'json_value\(data, *"([^"]+)"', r'\bdata\.(?:at|contains)\("([^"]+)"\)'),
}
HEAD = '''"""Request fields of other servers and of OpenAI's client, and these programs' versions.

Made by `tests/api/generate_known_fields.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS: Mapping[str, str] = {
%s}

# fmt: off
KNOWN_FIELDS: Mapping[str, tuple[str, ...]] = {
%s}
'''


def vllm_fields(folder: Path) -> Iterator[str]:
    """Yield the fields of vLLM's requests, which are pydantic models."""
    for endpoint in ("chat_completion", "completion"):
        path = folder / "vllm/entrypoints/openai" / endpoint / "protocol.py"
        yield from _class_fields(path, r"(Chat)?CompletionRequest")


def openai_fields(folder: Path) -> Iterator[str]:
    """Yield the fields of OpenAI's requests, which are typed dictionaries."""
    for path in ("chat/completion_create_params.py", "completion_create_params.py"):
        yield from _class_fields(folder / "openai/types" / path, r"CompletionCreateParams\w*")


def llama_fields(folder: Path) -> Iterator[str]:
    """Yield the fields that llama.cpp's server reads."""
    for name, patterns in LLAMA_PATTERNS.items():
        source = (folder / LLAMA / name).read_text("utf-8")
        for pattern in patterns:
            yield from re.findall(pattern, source)


def _class_fields(path: Path, name: str) -> Iterator[str]:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and re.fullmatch(name, node.name):
            for entry in node.body:
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                    yield entry.target.id


def version_of(folder: Path, package: str) -> str:
    """Return the version that the metadata of a wheel or of a source distribution names."""
    for path in [*folder.glob(f"{package}-*.dist-info/METADATA"), folder / "PKG-INFO"]:
        if path.is_file():
            found = re.search(r"^Version: (\S+)$", path.read_text("utf-8"), re.MULTILINE)
            if found:
                return found[1]
    raise SystemExit(f"{folder} has no metadata of {package}")


SOURCES: dict[str, tuple[str, Callable[[Path], Iterator[str]]]] = {
    "vLLM": ("vllm", vllm_fields),
    "llama.cpp": ("llama_cpp_python", llama_fields),
    "OpenAI": ("openai", openai_fields),
}


def main(folders: list[str]) -> None:
    """Write the module."""
    known: dict[str, list[str]] = {}
    versions = []
    for (engine, (package, fields)), folder in zip(SOURCES.items(), map(Path, folders), strict=True):
        versions.append(f'    "{engine}": "{package} {version_of(folder, package)}",\n')
        for field in sorted(set(fields(folder))):
            if not field.startswith("_"):
                known.setdefault(field, []).append(engine)
    lines = [f'    "{field}": {_tuple(engines)},\n' for field, engines in sorted(known.items())]
    OUT.write_text(HEAD % ("".join(versions), "".join(lines)), "utf-8")
    print(f"{len(known)} fields in {OUT}")


def _tuple(names: list[str]) -> str:
    inner = ", ".join(f'"{name}"' for name in names)
    return f"({inner},)" if len(names) == 1 else f"({inner})"


if __name__ == "__main__":
    main(sys.argv[1:])
