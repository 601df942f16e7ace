"""The names of members on this machine, and the span of each one."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.errors import SpanError, UsageError
from convoy.plan.span import split_key

MAX_LOCAL_MEMBERS = 64
_GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"),
    *("nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)


def local_names(num_members: int) -> tuple[str, ...]:
    """Return names for the members of a cluster on this machine, the head first. Raises UsageError."""
    if not 1 <= num_members <= MAX_LOCAL_MEMBERS:
        raise UsageError(f"--members is {num_members}, expected 1 to {MAX_LOCAL_MEMBERS}")
    numbered = (f"member-{number}" for number in range(len(_GREEK) + 1, num_members + 1))
    return (*_GREEK[:num_members], *numbered)


def spans_by_name(layers: Sequence[str] | None, names: Sequence[str]) -> dict[str, str] | None:
    """Return the spans of ``--layers`` by member, or None without the flag. `plan.span` parses the spans.

    A bare span is for the next member without one. ``alpha+beta=`` is for one stage of two ranks. Raises
    UsageError for an unknown or repeated name, and for more spans than members.
    """
    if not layers:
        return None
    spans: dict[str, str] = {}
    for text in layers:
        name, equals, span = text.partition("=")
        if not equals:
            taken = [rank for key in spans for rank in split_key(key)]
            name, span = next((name for name in names if name not in taken), ""), text
            if not name:
                raise UsageError(
                    f"--layers was given {len(layers)} times, and there are {len(names)} members",
                    hint="leave out spans, or add members",
                )
        unknown = next((rank for rank in _ranks(text, name) if rank not in names), None)
        if unknown is not None:
            raise UsageError(f"--layers {text} is for {unknown}, expected a member: {', '.join(names)}")
        if name in spans:
            raise UsageError(
                f"--layers gives {name} two spans, {spans[name]} and {span}", hint="give each member one span"
            )
        spans[name] = span
    return spans


def _ranks(text: str, name: str) -> tuple[str, ...]:
    try:
        return split_key(name)
    except SpanError as error:
        raise UsageError(f"--layers {text}: {error.message}") from None
