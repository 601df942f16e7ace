"""Choose the cuts of a model to check: every place for two members, a sample for three."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

from convoy.errors import ConvoyError
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.placement import place
from convoy.plan.span import Span, format_span
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import StageAssignment

# Stages in the order of their layers.
Layout = tuple[StageAssignment, ...]

# The number of cuts into three to check, if the model has that many.
THREE_WAY = 4
# More than any model needs, and the same for every member, so that memory decides nothing.
_MEMORY_BYTES = 1 << 60
_T = TypeVar("_T")


def whole(spec: ModelSpec) -> Layout:
    """Return the layout of one stage with everything."""
    return _layout(spec, (), forward=False)


def layouts(spec: ModelSpec, max_cuts: int | None = None) -> list[Layout]:
    """Return the layouts to check beside the whole: at most ``max_cuts`` two-way cuts, then three-way ones.

    Every cut of two has the default layout, with both ends of the model on the first member. The one in the
    middle is also checked forward, with the output on the last member. So is every other cut of three. The
    plans that Convoy makes by itself for two and three equal members are always included. Cuts that the spec
    forbids never are.
    """
    cuts = allowed_cuts(spec)
    pairs = list(itertools.combinations(cuts, 2))
    if max_cuts is not None:
        cuts = spread(cuts, max_cuts)
    two = [_layout(spec, (cut,), forward=False) for cut in cuts]
    two += [_layout(spec, (cut,), forward=True) for cut in cuts[len(cuts) // 2 :][:1]]
    few = THREE_WAY if max_cuts is None else min(THREE_WAY, max_cuts)
    three = [_layout(spec, pair, forward=index % 2 == 1) for index, pair in enumerate(spread(pairs, few))]
    found = [*_planned(spec, 2), *two, *_planned(spec, 3), *three]
    # Order by cuts, because a stage that grows by a layer keeps the layers that it has.
    return sorted({layout_text(spec, layout): layout for layout in found}.values(), key=_order)


def allowed_cuts(spec: ModelSpec) -> list[int]:
    """Return the layers before which the model may be cut."""
    return [cut for cut in range(1, spec.num_layers) if cut not in spec.forbidden_cuts]


def spread(values: Sequence[_T], most: int) -> list[_T]:
    """Return at most ``most`` of ``values``, evenly spaced, with the first and the last among them."""
    if most >= len(values):
        return list(values)
    if most <= 1:
        return list(values[len(values) // 2 :][:most])
    return [values[index * (len(values) - 1) // (most - 1)] for index in range(most)]


def layout_text(spec: ModelSpec, layout: Iterable[StageAssignment]) -> str:
    """Return a layout as text, like ``0:5,output + 6:11``."""
    spans = (Span(stage.start, stage.end, stage.output) for stage in layout)
    return " + ".join(format_span(span, spec.num_layers) for span in spans)


def _layout(spec: ModelSpec, cuts: Sequence[int], *, forward: bool) -> Layout:
    limits = [0, *cuts, spec.num_layers]
    owner = len(cuts) if forward else 0
    return tuple(
        StageAssignment(f"member-{index + 1}", start, end, embed=index == 0, output=index == owner)
        for index, (start, end) in enumerate(itertools.pairwise(limits))
    )


def _planned(spec: ModelSpec, num_members: int) -> list[Layout]:
    """Return the layout that Convoy plans by itself for so many equal members, or nothing without a plan."""
    offers = [
        MemberOffer(f"member-{index + 1}", _MEMORY_BYTES, head=index == 0) for index in range(num_members)
    ]
    try:
        return [place(spec, offers).stages]
    except ConvoyError:
        # The model has fewer layers than members, or no allowed cut.
        return []


def _order(layout: Layout) -> tuple[int, ...]:
    return len(layout), not layout[0].output, *(stage.start for stage in layout)
