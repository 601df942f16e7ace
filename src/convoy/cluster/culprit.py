"""At which member a late step stands, from what each says it has sent on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def first_that_keeps(members: Sequence[str], reached: Mapping[str, int], step: int) -> str | None:
    """Of ``members`` in the ring's order, the one that keeps ``step``; None if all have passed it on.

    ``reached`` has the last step that each sent on. Who does not answer is held back with its inbox full: by
    itself, or because the next takes nothing and does not answer either. So of several in a row that do not
    answer it is the last; and one whose successor has passed the step on did so too.
    """
    held: str | None = None
    for member in members:
        if member not in reached:
            held = member
        elif reached[member] < step:
            return held or member
        else:
            held = None
    return held
