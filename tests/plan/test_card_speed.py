"""The speed of a card with weights in a form, from its rates in bfloat16."""

from __future__ import annotations

import pytest

from convoy.config.kernels import CARD_FORMS
from convoy.plan.card_speed import FORMS, on_card
from convoy.plan.speed import Speed

MEASURED = Speed(4e12, 800e12, starts_s=5e-6)
ELEMENTS = 28672 * 4096


def seconds(form: str, rows: int) -> float:
    """Return the time of a product of ``rows`` rows, as a step's time counts it."""
    size = FORMS[form].weight_bytes if form in FORMS else 2
    return sum(on_card(MEASURED, form).linear_s(rows, size * ELEMENTS, ELEMENTS))


def test_every_form_that_a_card_keeps_has_times() -> None:
    assert CARD_FORMS.keys() <= FORMS.keys()


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_form_takes_its_share_of_the_time_of_bfloat16(form: str) -> None:
    times = FORMS[form]
    assert seconds(form, 1) == pytest.approx(times.lone * seconds("", 1))
    assert seconds(form, 2048) == pytest.approx(times.many * seconds("", 2048), rel=0.01)
    if times.few > times.lone:
        assert seconds(form, 16) == pytest.approx(times.few * seconds("", 16))


def test_a_form_without_a_layout_is_bfloat16_and_a_slower_host_has_longer_steps() -> None:
    assert on_card(MEASURED, "gguf:IQ1_S") == on_card(MEASURED, "")
    slow = on_card(Speed(4e12, 800e12, starts_s=1e-5), "")
    assert slow.step_s == pytest.approx(2 * on_card(MEASURED, "").step_s)
    assert on_card(Speed(4e12, 800e12), "").step_s > 0, "a card elsewhere has a usual host"
