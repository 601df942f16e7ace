"""List which popular models fit some members, in which form and how fast: the core of `convoy plan --fit`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from convoy.config.kernels import AUTO, QUANTIZED
from convoy.errors import PlanError, SpanError, UsageError
from convoy.sdk.planning.planning import plan_source

if TYPE_CHECKING:
    from convoy.model.checkpoints.source import ModelSource
    from convoy.plan.rates.rates import Links
    from convoy.plan.report import PlanReport
    from convoy.sdk.planning.members import PlanMembers
    from convoy.sdk.planning.planning import PlanQuestion
    from convoy.sdk.planning.speeds import Measurements

# The shapes of published models, each with the repository whose config.json it was taken from.
SHAPES = Path(__file__).resolve().parents[2] / "models" / "shapes.json"
# How the text about an assumed round trip begins, here and in `plan.rates`.
_TRIP = "a round trip of"
# The kernel that gives each form: files in bfloat16 as they are, or rounded as they are loaded.
STORED = "bf16"
FORMS = {STORED: AUTO, **QUANTIZED}


class FitForm(msgspec.Struct, frozen=True):
    """Describe one model in one form: its plan's figures, or in ``refused`` the reason why none fits."""

    form: str
    fits: bool
    # Over all members; of one machine where nothing fits.
    weight_bytes: int
    refused: str = ""
    hint: str = ""
    parallel: str = ""
    max_kv_tokens: int = 0
    decode_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    limit: str = ""
    # Of the head without the others; 0 if it has no room for the model.
    alone_tokens_per_s: float = 0.0


class FitRow(msgspec.Struct, frozen=True):
    """Describe one model; ``best`` is the form with the most bits that fits, or "" if none does."""

    model: str
    source: str
    num_elements: int
    best: str
    forms: list[FitForm]


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Describe a published model: its repository, and its tensors in bfloat16.

    ``is_choice`` marks those that answer chats and that a hub gives to everybody.
    """

    repo: str
    source: ModelSource
    is_choice: bool


class FitReport(msgspec.Struct, frozen=True):
    """Hold a row for each model. ``memory_bytes`` is what each member may plan with."""

    memory_bytes: dict[str, int]
    context: int
    rows: list[FitRow]
    # What the rates were computed from without a measurement, in words.
    assumed: list[str]


def shapes() -> Iterator[PublishedModel]:
    """Yield the published models of `SHAPES`."""
    from convoy.model.checkpoints.source import ModelSource
    from convoy.model.checkpoints.synthetic import describe_tensors
    from convoy.plan.spec.model import ModelSpec

    for row in json.loads(SHAPES.read_bytes()):
        name, config = row["name"], row["config"]
        drawn = describe_tensors(config, ModelSpec.from_config(config, name))
        tensors = {
            key: replace(tensor, dtype="BF16", num_bytes=tensor.num_bytes // 2)
            for key, tensor in drawn.items()
        }
        source = ModelSource.described(name, Path(), config, tensors)
        yield PublishedModel(row["source"], source, row.get("choice", False))


def find_fits(question: PlanQuestion, tell: Callable[[int, int, str], object] = lambda *_: None) -> FitReport:
    """Return which shapes fit the members of a question, which names no model.

    Each is planned in every form, as `make_plan` would. ``tell`` gets the number done, the number of all, and
    the next one. Raises UsageError for flags about one model.
    """
    if question.model is not None:
        raise UsageError(
            f"--fit lists popular models, and {question.model} is asked for",
            hint="leave out the one or --fit",
        )
    if question.kernel != AUTO or question.layers:
        raise UsageError(
            "--fit plans every form and shares layers by itself",
            hint=f"leave out {'--layers' if question.layers else question.kernel_from}",
        )
    members = question.find_members()
    measured, listed = question.measurements(members), list(shapes())

    def told() -> Iterator[PublishedModel]:
        for number, shape in enumerate(listed):
            tell(number, len(listed), shape.repo)
            yield shape

    return fit_shapes(question, members, measured, told())


def fit_shapes(
    question: PlanQuestion,
    members: PlanMembers,
    measurements: Measurements,
    listed: Iterable[PublishedModel],
    *,
    best_only: bool = False,
) -> FitReport:
    """Return which models of ``listed`` fit. With ``best_only``, plan no form after the first that fits."""
    rows: list[FitRow] = []
    assumed: dict[str, None] = {}
    for shape in listed:
        source, forms = shape.source, []
        for form in FORMS:
            found, texts = _form(question, members, measurements, source, form)
            forms.append(found)
            assumed |= dict.fromkeys(texts)
            if found.fits and best_only:
                break
        best = next((form.form for form in forms if form.fits), "")
        elements = sum(tensor.num_bytes // 2 for tensor in source.tensors.values())
        rows.append(FitRow(source.name, shape.repo, elements, best, forms))
    trips = _assumed_trips(measurements.links(members.offers), [offer.name for offer in members.offers])
    if trips and not any(text.startswith(_TRIP) for text in assumed):
        # Also where every model fits one member best: that choice rests on it.
        assumed[trips] = None
    memory = {offer.name: offer.memory_bytes for offer in members.offers}
    return FitReport(memory, question.context, rows, list(assumed))


def fit_as_stored(
    question: PlanQuestion, members: PlanMembers, measurements: Measurements, source: ModelSource
) -> FitForm:
    """Return the figures of a model in the form of its files."""
    found, _ = _form(question, members, measurements, source, STORED)
    if not found.fits:
        return found
    from convoy.model.backends.host.form_speed import main_form

    return msgspec.structs.replace(found, form=main_form(source).removeprefix("gguf:") or "F32")


def _assumed_trips(links: Links, names: Sequence[str]) -> str:
    """Return the round trips that no flag gave, in words; "" if there are none."""
    pairs = [pair for pair in itertools.combinations(names, 2) if frozenset(pair) not in links.by_pair]
    found = sorted({links.round_trip_s(*pair) for pair in pairs})
    return f"{_TRIP} {' or '.join(f'{one * 1000:g}' for one in found)} ms between members" if found else ""


def _form(
    question: PlanQuestion, members: PlanMembers, measurements: Measurements, source: ModelSource, form: str
) -> tuple[FitForm, list[str]]:
    """Return the figures of one model in one form, and what they assume."""
    spec = source.spec
    try:
        plan = plan_source(dataclasses.replace(question, kernel=FORMS[form]), members, source, measurements)
    except (PlanError, SpanError) as error:
        word = "bfloat16" if form == STORED else FORMS[form]
        weights = spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype=word)
        refused = FitForm(
            form, fits=False, weight_bytes=weights, refused=error.message, hint=error.hint or ""
        )
        return refused, []
    return _fitting(
        form, plan, min(question.context, spec.max_context)
    ), plan.rates.assumed if plan.rates else []


def _fitting(form: str, plan: PlanReport, context: int) -> FitForm:
    """Return the figures of a plan, or a refusal if it has no room for one sequence of ``context``."""
    refused = ""
    if plan.max_kv_tokens < context:
        refused = f"{plan.max_kv_tokens} tokens of K/V fit beside the weights, expected {context}"
    rates, alone = plan.rates, plan.rates_by_mode.get("single")
    return FitForm(
        form,
        fits=not refused,
        weight_bytes=plan.weight_bytes,
        refused=refused,
        parallel=plan.parallel.mode if plan.parallel else "",
        max_kv_tokens=plan.max_kv_tokens,
        decode_tokens_per_s=rates.decode.tokens_per_s if rates else 0.0,
        prefill_tokens_per_s=rates.prefill.tokens_per_s if rates else 0.0,
        limit=rates.decode.limit if rates else "",
        alone_tokens_per_s=alone.decode.tokens_per_s if alone else 0.0,
    )
