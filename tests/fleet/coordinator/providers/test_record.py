"""The record of providers that went or were refused: bounded, the latest first."""

from __future__ import annotations

from convoy.fleet.coordinator.providers.record import ProviderRecord


def test_a_provider_that_is_back_is_not_gone_and_a_loss_stays_counted() -> None:
    record = ProviderRecord(now=iter([10.0, 20.0, 30.0, 40.0]).__next__)
    record.joined("alpha")
    assert record.since("alpha") == 10.0
    record.left("alpha", b"\1" * 32, "self_signed", "its socket ended", "lost")
    (gone,) = record.gone()
    assert (gone.name, gone.identity, gone.since_unix_s, gone.how) == ("alpha", "01" * 32, 20.0, "lost")
    record.joined("alpha")
    assert record.gone() == []
    assert record.since("alpha") == 30.0
    record.left("alpha", b"\1" * 32, "self_signed", "its socket ended", "left")
    assert (record.num_lost, record.num_removed) == (1, 0)


def test_a_provider_that_an_administrator_removed_is_not_counted_as_lost() -> None:
    record = ProviderRecord()
    record.joined("alpha")
    record.left("alpha", bytes(32), "none", "an administrator removed it", "removed")
    assert (record.gone()[0].how, record.num_lost, record.num_removed) == ("removed", 0, 1)


def test_only_the_latest_are_kept_and_equal_reasons_are_counted_together() -> None:
    record = ProviderRecord(max_gone=2, max_refused=2)
    for name in ("alpha", "beta", "gamma"):
        record.joined(name)
        record.left(name, bytes(32), "none", "its socket ended", "lost")
    assert [one.name for one in record.gone()] == ["gamma", "beta"]
    for reason in ("first", "second", "first", "third", "first"):
        record.refused(reason)
    assert [(one.reason, one.times) for one in record.refusals()] == [("first", 3), ("third", 1)]
