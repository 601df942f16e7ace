"""Each rule about a file's shape finds a planted violation and lets the lawful neighbour pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture import shape
from architecture.source import Module, load_modules


def module_of(tmp_path: Path, text: str, name: str = "wire/frame.py") -> list[Module]:
    path = tmp_path / "src" / "convoy" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return load_modules(tmp_path / "src")


def test_a_module_of_601_lines_is_found_and_one_of_600_passes(tmp_path: Path) -> None:
    assert shape.long_modules(module_of(tmp_path, "x = 1\n" * 600)) == []
    assert shape.long_modules(module_of(tmp_path, "x = 1\n" * 601)) == [
        "src/convoy/wire/frame.py:1: 601 lines, and 600 is the limit"
    ]


@pytest.mark.parametrize("head", ["def f():", "async def f():", "class C:\n  def f(self):"])
def test_a_function_of_51_lines_is_found_and_one_of_50_passes(tmp_path: Path, head: str) -> None:
    line = head.count("\n") + 1
    assert shape.long_functions(module_of(tmp_path, head + "\n    x = 1" * 49)) == []
    assert shape.long_functions(module_of(tmp_path, head + "\n    x = 1" * 50)) == [
        f"src/convoy/wire/frame.py:{line}: f has 51 lines, and 50 is the limit"
    ]


def test_a_docstring_does_not_make_a_function_long(tmp_path: Path) -> None:
    text = 'def f():\n    """One.\n\n    Two.\n    """' + "\n    x = 1" * 49
    assert shape.long_functions(module_of(tmp_path, text)) == []


@pytest.mark.parametrize(
    "name", ["wire/utils.py", "wire/frame_util.py", "wire/misc/frame.py", "misc/frame.py"]
)
def test_a_module_named_after_nothing_is_found(tmp_path: Path, name: str) -> None:
    found = shape.banned_names(module_of(tmp_path, "", name))
    assert len(found) == 1
    assert found[0].startswith(f"src/convoy/{name}:1: a module is named ")


@pytest.mark.parametrize("name", ["LinkUtil", "HTTPUtils", "_MiscPool"])
def test_a_class_named_after_nothing_is_found(tmp_path: Path, name: str) -> None:
    found = shape.banned_names(module_of(tmp_path, f"x = 1\nclass {name}: pass"))
    assert found == [f"src/convoy/wire/frame.py:2: class {name}: say what it does"]


@pytest.mark.parametrize("name", ["Utility", "Miscible", "RequestHandler", "BaseStage"])
def test_a_word_that_only_contains_a_banned_one_passes(tmp_path: Path, name: str) -> None:
    assert shape.banned_names(module_of(tmp_path, f"class {name}: pass", f"wire/{name.lower()}.py")) == []


@pytest.mark.parametrize(
    "text", ["print('x')", "import sys; sys.stderr.write('x')", "import sys; f(sys.stdout)"]
)
def test_printing_outside_the_command_line_is_found(tmp_path: Path, text: str) -> None:
    assert len(shape.prints(module_of(tmp_path, text))) == 1
    assert len(shape.prints(module_of(tmp_path, text, "cli/output.py"))) == 1  # still just the first file's


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "def late():\n    import marshal",
        "eval('1')",
        "exec('1')",
        "import torch\ntorch.load('f')",
        "load(path, trust_remote_code=True)",
        "load(path, trust_remote_code=flag)",
        "import ssl\nssl.create_default_context()",
        "import ssl\nssl._create_unverified_context()",
    ],
)
def test_code_that_runs_what_it_reads_or_trusts_too_much_is_found(tmp_path: Path, text: str) -> None:
    found = shape.unsafe_code(module_of(tmp_path, text))
    assert len(found) == 1
    assert found[0].startswith(f"src/convoy/wire/frame.py:{text.count(chr(10)) + 1}: ")


@pytest.mark.parametrize("text", ["model.eval()", "load(path, trust_remote_code=False)", "json.load(file)"])
def test_lawful_neighbours_of_unsafe_code_pass(tmp_path: Path, text: str) -> None:
    assert shape.unsafe_code(module_of(tmp_path, text)) == []


@pytest.mark.parametrize(
    "call",
    [
        "msgspec.json.decode(data, type=Body)",
        "msgspec.json.decode(data, type=tuple[Turn, ...])",
        "msgspec.convert(data, Body)",
        "msgspec.convert(data, type=Body)",
        "msgspec.msgpack.Decoder(Body).decode(data)",
    ],
)
def test_a_type_that_msgspec_meets_first_in_a_function_is_found(tmp_path: Path, call: str) -> None:
    found = shape.unresolved_types(module_of(tmp_path, f"def f(data):\n    return {call}"))
    assert len(found) == 1
    assert found[0].startswith("src/convoy/wire/frame.py:2: ")


@pytest.mark.parametrize(
    "text",
    [
        "_decoder = msgspec.msgpack.Decoder(Body)",
        "def f(data):\n    return msgspec.json.decode(data)",
        "def f(data):\n    return msgspec.json.decode(data, type=dict[str, Any])",
        "def f(data):\n    return msgspec.json.decode(data, type=resolved(Body))",
        "def f(data):\n    return msgspec.convert(data, resolved(Body), dec_hook=hook)",
        "def f(data):\n    return data.decode(type=Body)",
    ],
)
def test_a_type_that_is_known_before_a_function_runs_passes(tmp_path: Path, text: str) -> None:
    assert shape.unresolved_types(module_of(tmp_path, text)) == []


@pytest.mark.parametrize("text", ["import os\nos.environ['X']", "import os\nos.getenv('X')"])
def test_reading_the_environment_outside_the_command_line_is_found(tmp_path: Path, text: str) -> None:
    assert shape.environment_reads(module_of(tmp_path, text)) == [
        "src/convoy/wire/frame.py:2: environment variables are read in cli/ and config/ alone"
    ]


def test_reading_the_environment_on_the_command_line_passes(tmp_path: Path) -> None:
    assert shape.environment_reads(module_of(tmp_path, "import os\nos.environ['X']", "cli/main.py")) == []


def test_a_path_of_some_machine_is_found_in_any_text_file(tmp_path: Path) -> None:
    private = "/wo" + "rk/main"
    page = tmp_path / "page.md"
    page.write_text(f"first\nsee {private}/x\n", encoding="utf-8")
    found = shape.machine_paths([page], tmp_path)
    assert len(found) == 1
    assert found[0].startswith("page.md:2: ")


def test_relative_paths_and_binary_files_pass(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("net" + "wo" + "rk/main and ./wo" + "rk/main\n", encoding="utf-8")
    binary = tmp_path / "noise.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert shape.machine_paths([page, binary], tmp_path) == []


def test_a_package_of_13_modules_is_found_and_one_of_12_passes(tmp_path: Path) -> None:
    for number in range(12):
        modules = module_of(tmp_path, "", f"wire/m{number}.py")
    (tmp_path / "src/convoy/wire/__init__.py").touch()
    modules = module_of(tmp_path, "", "wire/messages/__init__.py")
    assert shape.crowded_packages(modules) == []
    modules = module_of(tmp_path, "", "wire/m12.py")
    assert shape.crowded_packages(modules) == ["convoy.wire: 13 modules, and 12 is the limit"]


@pytest.mark.parametrize(
    ("text", "num_lines"),
    [("", 0), ('"""Frames.\n\nAnd tensors."""', 2), ('"""' + "\n".join("abcdefghijk") + '"""', 11)],
)
def test_a_package_that_says_too_little_or_too_much_is_found(
    tmp_path: Path, text: str, num_lines: int
) -> None:
    assert shape.silent_packages(module_of(tmp_path, text, "wire/__init__.py")) == [
        f"src/convoy/wire/__init__.py:1: say what is inside in 3 to 10 lines, not {num_lines}"
    ]


@pytest.mark.parametrize("lines", ["abc", "abcdefghij"])
def test_a_package_of_three_to_ten_lines_passes(tmp_path: Path, lines: str) -> None:
    text = '"""' + "\n\n".join(lines) + '"""'
    assert shape.silent_packages(module_of(tmp_path, text, "wire/__init__.py")) == []


def test_a_class_that_a_package_names_and_nobody_defines_is_found(tmp_path: Path) -> None:
    module_of(tmp_path, "class FrameHeader: pass")
    modules = module_of(tmp_path, '"""`FrameHeader`, `OldHeader`, `frame`."""', "wire/__init__.py")
    assert shape.stale_package_names(modules) == [
        "src/convoy/wire/__init__.py:1: no class is named OldHeader"
    ]


def test_a_small_module_for_one_neighbour_is_found_unless_it_says_why_it_is_apart(tmp_path: Path) -> None:
    module_of(tmp_path, "from convoy.wire.size import size", "wire/frame.py")
    found = shape.unexplained_small_modules(module_of(tmp_path, "size = 1", "wire/size.py"))
    text = "1 lines, for convoy.wire.frame alone: join them, or say why it is apart"
    assert found == [("wire", f"src/convoy/wire/size.py:1: {text}")]
    explained = '"""It is apart because it is generated."""'
    assert shape.unexplained_small_modules(module_of(tmp_path, explained, "wire/size.py")) == []


def test_a_small_module_of_two_importers_or_of_another_package_passes(tmp_path: Path) -> None:
    module_of(tmp_path, "from convoy.wire.size import size", "plan/span.py")
    assert shape.unexplained_small_modules(module_of(tmp_path, "size = 1", "wire/size.py")) == []
    module_of(tmp_path, "from convoy.wire.size import size", "wire/frame.py")
    assert shape.unexplained_small_modules(module_of(tmp_path, "size = 1", "wire/size.py")) == []


def test_a_module_of_60_lines_may_have_one_importer(tmp_path: Path) -> None:
    module_of(tmp_path, "from convoy.wire.size import size", "wire/frame.py")
    modules = module_of(tmp_path, "size = 1\n" * 60, "wire/size.py")
    assert shape.unexplained_small_modules(modules) == []


def test_a_public_class_name_of_two_modules_is_found(tmp_path: Path) -> None:
    module_of(tmp_path, "class Load: pass\nclass _Own: pass", "plan/rates.py")
    module_of(tmp_path, "class Load: pass", "plan/report.py")
    modules = module_of(tmp_path, "class Load: pass\nclass _Own: pass", "fleet/capacity.py")
    assert shape.repeated_class_names(modules) == [
        "class Load: src/convoy/fleet/capacity.py:1, src/convoy/plan/rates.py:1, src/convoy/plan/report.py:1"
    ]
    module_of(tmp_path, "", "plan/report.py")
    modules = module_of(tmp_path, "", "fleet/capacity.py")
    assert shape.repeated_class_names(modules) == []


def test_a_method_that_asks_whether_it_takes_a_frame_is_found(tmp_path: Path) -> None:
    text = "class A:\n    def takes(self): pass\n    def handle_piece(self): pass"
    assert shape.asking_methods(module_of(tmp_path, text)) == [
        "src/convoy/wire/frame.py:2: a row of `cluster.handlers` names the handler of a frame"
    ]


def test_the_frame_type_of_a_message_outside_its_class_is_found(tmp_path: Path) -> None:
    text = "x = FrameType.STEP\ny = FrameType.HIDDEN\nz = FrameType.HANDSHAKE_1"
    assert shape.stray_frame_types(module_of(tmp_path, text)) == [
        "src/convoy/wire/frame.py:1: FrameType.STEP: its class has it as `frame.type`"
    ]
    (tmp_path / "src" / "convoy" / "wire" / "frame.py").write_text("")
    assert shape.stray_frame_types(module_of(tmp_path, text, "wire/messages/control.py")) == []
