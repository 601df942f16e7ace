"""Rows with ratios that are easy to compute by hand."""

from __future__ import annotations

from convoy.bench.hop.hop import HopRow


def made_up_rows() -> tuple[HopRow, ...]:
    small, large = 8 * 1024, 16 * 1024 * 1024
    return (
        HopRow(small, "none", 50.0, 80.0, 1.0),
        HopRow(small, "outer", 80.0, 120.0, 0.6),
        HopRow(small, "both", 140.0, 200.0, 0.3),
        HopRow(large, "none", 10_000.0, 12_000.0, 4.0),
        HopRow(large, "outer", 30_000.0, 35_000.0, 2.0),
        HopRow(large, "both", 40_000.0, 50_000.0, 1.0),
    )
