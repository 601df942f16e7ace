"""What the picture of a cluster says beside its stages."""

from __future__ import annotations

from convoy.cli.picture import standbys_text
from convoy.cluster.status import StandbyStatus


def test_a_standby_is_named_with_what_it_has_loaded() -> None:
    text = standbys_text([StandbyStatus("gamma", "6-11"), StandbyStatus("delta")])
    assert text == "gamma (has loaded layers 6-11), delta (nothing loaded yet)"
