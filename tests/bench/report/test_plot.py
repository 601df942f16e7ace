"""A plot is well-formed, and its points lie where their numbers say."""

from __future__ import annotations

from xml.etree import ElementTree

from convoy.bench.report.plot import plot

SVG = "{http://www.w3.org/2000/svg}"


def test_points_double_to_the_right_and_grow_upwards_from_zero() -> None:
    drawn = ElementTree.fromstring(plot("t", "x", "y", {"a": [(1, 0), (4, 50), (16, 100)]}))  # noqa: S314
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in drawn.iter(f"{SVG}circle")]
    (x0, y0), (x1, y1), (x2, y2) = circles
    assert x0 < x1 < x2
    assert abs((x1 - x0) - (x2 - x1)) < 0.2
    assert y0 > y1 > y2
    assert abs((y0 - y1) - (y1 - y2)) < 0.2


def test_every_line_has_its_name_and_text_is_no_markup() -> None:
    drawn = ElementTree.fromstring(plot("<t> & x", "x", "y", {"a<b": [(1, 3)], "c": [(1, 7)]}))  # noqa: S314
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"<t> & x", "a<b", "c", "x", "y", "10", "0"} <= set(texts)
    assert len(list(drawn.iter(f"{SVG}polyline"))) == 2
