"""``convoy.toml``: every setting is read, and an error names its file, table and key."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.cluster.options import HeadOptions
from convoy.config.settings import Config, decode_public_key, load_config, override
from convoy.config.table import ListenConfig, ServeConfig
from convoy.errors import ConfigError
from convoy.sdk.options import head_options, peer_options, serve_options

WHOLE = """
[cluster]
name = "alpha"
identity = "keys/alpha"
roster = "/etc/convoy/roster.toml"
operator_key = "ed302324513d2a4d4e134a4e897f98d70829bd9e5071f0b190820500f72eec26"

[listen]
host = "10.0.0.1"
port = 7001
discover = true

[serve]
host = "127.0.0.1"
port = 9000
api_key_file = "api.key"
max_waiting = 10
drain_s = 5

[model]
path = "models/llama"
kernel = "exact-f32"
activation_dtype = "float32"
num_threads = 4
memory_gb = 1.5

[engine]
max_batch = 8
max_step_tokens = 128
prefill_chunk = 64
prefill_window = 3
micro_batches = 5
level_chunks = false
block_size = 8
num_blocks = 100

[plan]
layers = { alpha = "0:5,output", beta = "6:11" }
wait_s = 2.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "convoy.toml"


def load(file: Path, text: str) -> Config:
    file.write_text(text, encoding="utf-8")
    return load_config(file)


def test_every_key_is_read_and_paths_are_relative_to_the_file(file: Path) -> None:
    config = load(file, WHOLE)
    assert config.require_name() == "alpha"
    assert config.require_identity() == file.parent / "keys" / "alpha"
    assert config.require_roster() == Path("/etc/convoy/roster.toml")
    assert config.require_operator_key().hex().startswith("ed302324")
    assert config.listen == ListenConfig("10.0.0.1", 7001, discover=True)
    assert not ListenConfig().discover
    assert config.serve == ServeConfig("127.0.0.1", 9000, file.parent / "api.key", 10, 5.0)
    assert config.model_name() == str(file.parent / "models/llama")
    assert (config.model.kernel, config.model.num_threads, config.model.memory_gb) == ("exact-f32", 4, 1.5)
    assert (config.engine.max_batch, config.engine.num_blocks) == (8, 100)
    assert config.plan.layers == {"alpha": "0:5,output", "beta": "6:11"}
    assert config.plan.wait_s == 2.5
    assert config.path == file


def test_no_file_and_an_empty_file_give_the_same_defaults(file: Path) -> None:
    assert load(file, "") == override(load_config(None), path=file)
    assert load_config(None).serve.port == 8765
    assert load_config(None).serve.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[sreve]\nport = 1", "there is no table [sreve]", "did you mean serve?"),
        ("[serve]\nprot = 1", "[serve] has no key prot", "did you mean port?"),
        ("[serve]\nxyzzy = 1", "[serve] has no key xyzzy", "known are host, port"),
        ("serve = 3", "serve is 3, expected a table [serve]", None),
        ("[serve]\nport = 70000", "[serve] port is 70000: expected a whole number <= 65535", None),
        ("[serve]\nport = 'x'", "[serve] port is 'x': expected a whole number, got text", "under [serve]"),
        ("[serve]\nport = true", "[serve] port is True: expected a whole number, got true or false", None),
        ("[serve]\ndrain_s = -1.0", "[serve] drain_s is -1.0: expected a number >= 0.0", None),
        (
            "[model]\nkernel = 'fast'",
            "[model] kernel is 'fast': expected auto, exact-f32, plain-f32, exact-q8",
            None,
        ),
        ("[model]\nname = 'demo'\npath = 'x'", "[model] has both name and path", None),
        ("[engine]\nmicro_batches = 65", "[engine] micro_batches is 65: expected a whole number <= 64", None),
        ("[engine]\nmax_batch = 0", "[engine] max_batch is 0: expected a whole number >= 1", None),
        ("[engine]\nspeculate = 65", "[engine] speculate is 65: expected a whole number <= 64", None),
        (
            "[plan]\nlayers = { alpha = 3 }",
            "[plan] layers is a table: expected text, got a whole number",
            None,
        ),
        (
            "[serve]\nallowed_hosts = [3]",
            "[serve] allowed_hosts is [3]: expected text, got a whole number",
            "under [serve]",
        ),
        ("[cluster]\nidentity = 3", "[cluster] identity is 3: expected a path as text", None),
        ("port = = 1", "is not TOML", "docs/configuration.md has the keys"),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file, text)
    assert str(file) in caught.value.message
    assert message in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


def test_a_binary_file_is_refused_as_no_text(file: Path) -> None:
    file.write_bytes(b"\x7fELF\xff\xfe")
    with pytest.raises(ConfigError, match=r"convoy\.toml is not a text file") as caught:
        load_config(file)
    assert "check the path" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "method", ["require_name", "require_identity", "require_roster", "require_operator_key"]
)
def test_what_a_verb_needs_and_the_file_lacks_is_named(file: Path, method: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[cluster\] lacks {method.removeprefix('require_')}$"):
        getattr(load(file, ""), method)()


def test_a_file_that_is_not_there_is_named_and_so_is_who_makes_one(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*convoy\.toml: no such file or directory") as caught:
        load_config(file)
    assert "`convoy join -`" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="is a directory") as caught:
        load_config(file.parent)
    assert caught.value.hint == f"name the file itself: {file}"


def test_off_loopback_a_key_or_a_word_is_wanted_and_the_hint_has_both(file: Path) -> None:
    text = '[serve]\nhost = "192.0.2.1"\n'
    with pytest.raises(ConfigError, match="without an api key") as caught:
        serve_options(load(file, text)).check()
    assert "--api-key-file FILE" in (caught.value.hint or "")
    assert "allow_unauthenticated = true" in (caught.value.hint or "")
    serve_options(load(file, f"{text}allow_unauthenticated = true\n")).check()


def test_a_standby_is_one_by_the_file_or_by_the_flag(file: Path) -> None:
    assert peer_options(load(file, "[cluster]\nstandby = true"), None, exit_with_head=False).standby
    assert not peer_options(load(file, ""), None, exit_with_head=False).standby


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than 1048576 bytes"):
        load_config(Path("/dev/zero"))


@pytest.mark.parametrize("form", [bytes.hex, lambda key: base64.b64encode(key).decode()])
def test_a_public_key_is_read_from_hex_and_from_base64(form: Callable[[bytes], str]) -> None:
    assert decode_public_key(form(bytes(range(32))), "the key") == bytes(range(32))


@pytest.mark.parametrize("text", ["", "zz" * 32, "not a key", "AAAA"])
def test_what_is_no_public_key_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^the key "):
        decode_public_key(text, "the key")


def test_flags_that_were_given_win_over_the_file(file: Path) -> None:
    serve = load(file, WHOLE).serve
    assert override(serve, port=1, host=None) == ServeConfig("127.0.0.1", 1, file.parent / "api.key", 10, 5.0)


def test_the_keys_of_the_file_are_the_servers(file: Path) -> None:
    key = file.parent / "api.key"
    with pytest.raises(ConfigError, match="cannot read the api key file") as caught:
        serve_options(load(file, WHOLE))
    assert "`convoy keys new FILE`" in (caught.value.hint or "")
    key.touch(mode=0o600)
    key.write_text("sesame-open-yourself\n", encoding="utf-8")
    ring = serve_options(load(file, WHOLE)).keys
    assert ring is not None
    assert ring.find("sesame-open-yourself").name == "default"


def test_what_the_file_says_of_the_engine_reaches_the_head(file: Path) -> None:
    options = head_options(load(file, WHOLE))
    assert (options.max_batch, options.max_step_tokens, options.prefill_chunk) == (8, 128, 64)
    assert (options.prefill_window, options.micro_batches, options.level_chunks) == (3, 5, False)
    # guesses are a choice of the command line's
    plain = head_options(Config())
    assert plain == replace(HeadOptions(), member=plain.member, speculate=plain.speculate)
    assert (plain.speculate, plain.guess_inexact) == (8, False)
    for number in (0, 8):
        asked = head_options(load(file, f"[engine]\nspeculate = {number}"))
        assert (asked.speculate, asked.guess_inexact) == (number, True)


def test_prompts_are_shared_across_keys_only_where_the_file_says_so(file: Path) -> None:
    assert not head_options(load(file, WHOLE)).share_across_keys
    assert head_options(load(file, "[engine]\nshare_across_keys = true")).share_across_keys


@pytest.mark.parametrize(
    ("text", "seconds"),
    [('"5m"', 300), ("90", 90), ('"1h"', 3600), ('"never"', None), ("-1", None), ("0", 0), ('"0"', 0)],
)
def test_keep_alive_takes_every_form_of_a_duration(text: str, seconds: float | None, tmp_path: Path) -> None:
    file = tmp_path / "convoy.toml"
    file.write_text(f"[serve]\nkeep_alive = {text}\n")
    assert load_config(file).serve.keep_alive_s == seconds


def test_a_keep_alive_that_is_no_duration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "convoy.toml"
    file.write_text('[serve]\nkeep_alive = "soon"\n')
    with pytest.raises(ConfigError, match="keep_alive is 'soon', expected seconds, a duration such as 5m"):
        load_config(file)
    file.write_text(f"[serve]\nkeep_alive = {'9' * 400}\n")
    with pytest.raises(ConfigError, match="keep_alive is"):
        load_config(file)
