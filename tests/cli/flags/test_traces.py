from __future__ import annotations

from pathlib import Path

import pytest

from convoy.api.traces import NO_TRACES
from convoy.cli.flags.traces import tracing
from convoy.cli.proxy import read_proxy_file
from convoy.cli.running.coordinator_file import load_telemetry
from convoy.config.settings import load_config
from convoy.errors import ConfigError

URL = "https://collector.example:4318"


def test_each_file_may_name_a_collector_and_none_has_to(tmp_path: Path) -> None:
    named, bare = tmp_path / "named.toml", tmp_path / "bare.toml"
    named.write_text(f'[telemetry]\ntraces = "{URL}"\n')
    bare.write_text("")
    assert load_config(named).telemetry.traces == URL
    assert load_telemetry(named).traces == URL
    assert read_proxy_file(named).telemetry.traces == URL
    found = [load_config(bare).telemetry, load_telemetry(bare), load_telemetry(None)]
    assert [one.traces for one in found] == [None] * 3


def test_another_key_beside_it_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    file.write_text('[telemetry]\ntrace = "x"\n')
    for read in (load_config, load_telemetry, read_proxy_file):
        with pytest.raises(ConfigError, match="trace"):
            read(file)


def test_without_a_collector_nothing_is_traced() -> None:
    with tracing(None, "convoy-test") as traces:
        assert traces is NO_TRACES
        assert traces.begin("chat", "m").traceparent == ""
