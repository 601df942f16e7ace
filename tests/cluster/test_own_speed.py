"""This machine's speed: the best of several measurements, and the middle one of some days."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.cluster.own_speed import FILE, OwnSpeed, own_speed
from convoy.plan.speed import Speed


def measured(
    rates: Iterator[float],
    folder: Path | None,
    *,
    each_s: float = 0.5,
    busy: float = 0.0,
    rough: bool = False,
) -> OwnSpeed:
    """Measure with a clock that moves by ``each_s`` for each measurement."""
    clock = [100.0]

    def measure(*_: object) -> Speed:
        clock[0] += each_s
        return Speed(next(rates), 5e9, layer_s=1e-4)

    return own_speed(
        "exact-f32",
        2,
        "cpu",
        folder,
        rough=rough,
        measure=measure,
        busy=lambda: busy,
        now=lambda: clock[0],
    )


def test_the_best_of_several_measurements_counts() -> None:
    assert measured(iter([2.1e9, 11e9, 9e9, 8e9, 7e9]), None).speed.read_bytes_per_s == 11e9


def test_on_a_busy_machine_the_middle_measurement_counts_and_is_not_kept(tmp_path: Path) -> None:
    """Seen there: 411 GB/s, from a difference of times that other programs made."""
    busy = measured(iter([2e9, 411e9, 1e9, 3e9, 4e9]), tmp_path, busy=0.9)
    assert busy.speed.read_bytes_per_s == 3e9
    assert not (tmp_path / FILE).exists()


def test_measurements_end_after_three_seconds() -> None:
    for each_s, made in ((1.0, 3), (0.1, 5), (40.0, 1)):
        rates = iter([1e9] * 9)
        measured(rates, None, each_s=each_s)
        assert 9 - len(list(rates)) == made


def test_a_busy_day_does_not_replace_earlier_days(tmp_path: Path) -> None:
    assert not measured(itertools.repeat(12e9), tmp_path).is_kept
    later = measured(itertools.repeat(2.1e9), tmp_path, busy=0.9)
    assert later.is_kept
    assert later.speed == Speed(12e9, 5e9, layer_s=1e-4)
    assert later.warning is not None
    assert "90% of this machine's cores: the figures are the middle of earlier" in later.warning


@pytest.mark.parametrize(("busy", "rough"), [(0.9, False), (0.0, True)])
def test_nothing_is_measured_where_figures_of_earlier_days_are_enough(
    tmp_path: Path, busy: float, *, rough: bool
) -> None:
    assert measured(iter([5e9]), tmp_path, each_s=9.0, rough=rough).speed.read_bytes_per_s == 5e9
    assert measured(iter([]), tmp_path, busy=busy, rough=rough).speed.read_bytes_per_s == 5e9


def test_one_reading_that_is_far_too_high_does_not_count_on_later_days(tmp_path: Path) -> None:
    assert measured(itertools.repeat(411e9), tmp_path).speed.read_bytes_per_s == 411e9
    for rate in (12e9, 11e9, 13e9):
        assert measured(itertools.repeat(rate), tmp_path).speed.read_bytes_per_s <= 13e9
    assert measured(itertools.repeat(1e9), tmp_path, busy=0.9).speed.read_bytes_per_s == 12e9


def test_a_machine_that_becomes_slower_is_believed_after_some_days(tmp_path: Path) -> None:
    for _ in range(9):
        measured(itertools.repeat(12e9), tmp_path)
    seen = [measured(itertools.repeat(4e9), tmp_path).speed.read_bytes_per_s for _ in range(3)]
    assert seen == [12e9, 12e9, 4e9]


def test_a_busy_machine_without_earlier_figures_is_a_warning() -> None:
    found = measured(itertools.repeat(2.1e9), None, busy=0.8)
    assert found.warning == "programs use 80% of this machine's cores: figures may be too low"
    assert measured(itertools.repeat(2.1e9), None, busy=0.1).warning is None


def test_figures_of_other_kernels_and_threads_are_kept_apart(tmp_path: Path) -> None:
    measured(itertools.repeat(12e9), tmp_path)
    other = own_speed("exact-q8", 2, "cpu", tmp_path, measure=lambda *_: Speed(1e9, 1e9), busy=lambda: 0.0)
    assert other.speed.read_bytes_per_s == 1e9


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b"[1]",
        b'{"a": 3}',
        b'{"a": [{"read_bytes_per_s": -1}]}',
        b'{"a": []}',
        b'{"a": {"read_bytes_per_s": 1}}',
        b"[" * 9999,
        b"\xff" * 70000,
    ],
)
def test_a_file_that_is_no_record_of_speeds_counts_for_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)
    found = measured(itertools.repeat(3e9), tmp_path)
    assert (found.is_kept, found.speed.read_bytes_per_s) == (False, 3e9)


def test_a_folder_that_cannot_be_written_keeps_nothing_and_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert measured(itertools.repeat(3e9), tmp_path / "file").speed.read_bytes_per_s == 3e9
