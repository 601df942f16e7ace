"""Hold all providers of one model as columns of numbers: 10,000 compare in a tenth of a millisecond.

Each provider of the model has a row. The coordinator counts the requests that it sent there itself,
because a heartbeat is old when it arrives. It knows a provider's other load from the heartbeat alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from convoy.fleet.capacity import Capacity, Load, ModelState, Places
from convoy.fleet.coordinator.routing.route_request import Owner, RouteRequest, Trusted
from convoy.trust.evidence.level import Level

Column = npt.NDArray[np.float64]

_GROWTH = 2
_FIRST_ROOM = 16
# Beginnings of prompts that are remembered for a model.
_MAX_TAGS = 4096
_MAX_PROVIDERS_PER_TAG = 8
# The weight of the newest measurement.
_MEMORY = 0.2
# Limits of the factor by which measurements correct the offered rates.
_LEAST_SCALE, _MOST_SCALE = 1 / 16, 16.0
_COLUMNS = (
    *("slots", "running", "foreign", "alone_s", "slope_s", "prefill_rate", "backlog", "decode_scale"),
    *("said_scale", "prefill_scale", "penalty_s", "closed_until_s", "level", "max_context", "open"),
)


class ProviderTable:
    """Hold one column a figure and one row a provider. A row keeps its index until `remove`."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {name: np.zeros(_FIRST_ROOM) for name in _COLUMNS}
        self._names: list[str | None] = [None] * _FIRST_ROOM
        self._index: dict[str, int] = {}
        self._free = list(range(_FIRST_ROOM - 1, -1, -1))
        # Rows and their prompt tokens, by tag.
        self._tags: OrderedDict[bytes, OrderedDict[int, int]] = OrderedDict()
        self._owners: dict[int, Owner] = {}
        # Rows, by their provider's key and by their operator's key.
        self._of_key: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def add(self, name: str, capacity: Capacity, level: Level, owner: Owner | None = None) -> None:
        """Add a provider with nothing running. A provider that is here already starts anew."""
        if name in self._index:
            self.remove(name)
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._index[name], self._names[row] = row, name
        if owner is not None:
            self._owners[row] = owner
            for key in _keys_of(owner):
                self._of_key.setdefault(key, set()).add(row)
        alone = capacity.token_s(1)
        values = {
            "slots": capacity.slots,
            "alone_s": alone,
            "slope_s": (capacity.token_s(capacity.slots) - alone) / max(1, capacity.slots - 1),
            "prefill_rate": capacity.prefill_rate,
            "prefill_scale": 1.0,
            "level": float(level),
            "max_context": capacity.max_context,
            "open": 1.0,
        }
        for column, array in self._columns.items():
            array[row] = values.get(column, 0.0)

    def remove(self, name: str) -> None:
        """Remove a provider; does nothing for an unknown one."""
        row = self._index.pop(name, None)
        if row is None:
            return
        self._names[row] = None
        if (owner := self._owners.pop(row, None)) is not None:
            for key in _keys_of(owner):
                self._of_key[key].discard(row)
                if not self._of_key[key]:
                    del self._of_key[key]
        # Without slots, no policy chooses the row until it is taken again.
        self._columns["open"][row] = self._columns["slots"][row] = 0.0
        for rows in self._tags.values():
            rows.pop(row, None)
        self._free.append(row)

    def note_load(self, name: str, load: Load) -> None:
        """Note a heartbeat: the provider's load from other sources, and its prompt tokens still to read."""
        row, columns = self._index[name], self._columns
        slots, running = columns["slots"][row], columns["running"][row]
        # Slots taken by others: all slots without those that this coordinator uses and those that are free.
        columns["foreign"][row] = max(0.0, slots - running - min(load.free_slots, slots))
        columns["backlog"][row] = load.queued_tokens
        said = 0.0
        if load.decode_rate:
            said = _bounded(1 / load.decode_rate / self._token_s(row, load.streams))
        columns["said_scale"][row] = said

    def set_open(self, name: str, is_open: bool) -> None:
        """Set whether the provider takes new requests."""
        self._columns["open"][self._index[name]] = float(is_open)

    def set_level(self, name: str, level: Level) -> None:
        """Set the level that the provider's newest evidence proves."""
        self._columns["level"][self._index[name]] = float(level)

    def begin(self, name: str, ask: RouteRequest) -> None:
        """Count ``ask`` as running at the provider."""
        row = self._index[name]
        self._columns["running"][row] += 1
        self._columns["backlog"][row] += ask.prompt_tokens
        if ask.tag:
            rows = self._tags.setdefault(ask.tag, OrderedDict())
            self._tags.move_to_end(ask.tag)
            rows[row] = ask.prompt_tokens
            rows.move_to_end(row)
            if len(rows) > _MAX_PROVIDERS_PER_TAG:
                rows.popitem(last=False)
            if len(self._tags) > _MAX_TAGS:
                self._tags.popitem(last=False)

    def has_read(self, name: str, ask: RouteRequest) -> None:
        """Take the prompt of ``ask`` off the provider's backlog, because its first token is here."""
        if (row := self._index.get(name)) is not None:
            backlog = self._columns["backlog"]
            backlog[row] = max(0.0, backlog[row] - ask.prompt_tokens)

    def end(self, name: str) -> None:
        """Count one request less as running at the provider."""
        if (row := self._index.get(name)) is not None:
            running = self._columns["running"]
            running[row] = max(0.0, running[row] - 1)

    def close_until(self, name: str, until_s: float, penalty_s: float) -> None:
        """Send the provider nothing until ``until_s``, then one request at a time until one ends well.

        Its reported free slots do not count: a provider that refuses everything always has some.
        """
        if (row := self._index.get(name)) is not None:
            self._columns["closed_until_s"][row] = until_s
            self._columns["penalty_s"][row] = penalty_s

    def learn(
        self,
        name: str,
        ask: RouteRequest,
        *,
        first_s: float,
        output_tokens: int,
        decode_s: float,
        running: int,
    ) -> None:
        """Correct the provider's rates by one complete answer.

        ``first_s`` are the seconds to its first token, and ``decode_s`` those from there on.
        """
        row = self._index.get(name)
        if row is None:
            return
        columns = self._columns
        columns["penalty_s"][row] = 0.0
        expected_first = ask.prompt_tokens / columns["prefill_rate"][row]
        self._correct("prefill_scale", row, first_s, expected_first)
        self._correct("decode_scale", row, decode_s, self._token_s(row, running) * (output_tokens - 1))

    def num_open(self) -> int:
        """Return how many providers take new requests."""
        return int((self._columns["open"] > 0).sum())

    def free_slots(self) -> int:
        """Return the free slots of all providers together."""
        columns = self._columns
        free = columns["slots"] - columns["running"] - columns["foreign"]
        return int(np.maximum(free, 0.0)[columns["open"] > 0].sum())

    def running(self, name: str) -> int:
        """Return how many requests of this coordinator run at the provider."""
        return int(self._columns["running"][self._index[name]])

    def state(self, model: str, waiting: int) -> ModelState:
        """Return the state of all providers together, as that of ``model``, for which ``waiting`` wait."""
        columns = self._columns
        # Rows without a provider have no slots.
        here = columns["slots"] > 0
        counts = np.bincount(columns["level"][here].astype(np.intp), minlength=len(Level))
        return ModelState(
            model,
            providers=len(self._index),
            levels={level.text: int(counts[level]) for level in Level if counts[level]},
            max_context=int(columns["max_context"][here].max(initial=0.0)),
            free_slots=self.free_slots(),
            running=int(columns["running"][here].sum()),
            waiting=waiting,
        )

    def places(self, name: str) -> Places:
        """Return the provider's room."""
        row, columns = self._index[name], self._columns
        # A status asks this for thousands of rows, and floats of Python are many times as quick as numpy's.
        scale = max(columns["decode_scale"].item(row), columns["said_scale"].item(row)) or 1.0
        return Places(
            slots=int(columns["slots"].item(row)),
            taken_elsewhere=int(columns["foreign"].item(row)),
            # A heartbeat changes the last digits every few seconds.
            tokens_per_s=float(f"{1 / (columns['alone_s'].item(row) * scale):.3g}"),
            max_context=int(columns["max_context"].item(row)),
            on_trial=columns["penalty_s"].item(row) > 0,
        )

    def finish_s(self, ask: RouteRequest, output_tokens: float) -> Column:
        """Return the seconds in which each provider would finish ``output_tokens`` for ``ask``, if free."""
        columns = self._columns
        running = columns["running"] + columns["foreign"]
        prompt = np.full(len(running), float(ask.prompt_tokens))
        for row, tokens in self._tags.get(ask.tag, {}).items() if ask.tag else ():
            # The provider has read this beginning of the prompt before, so it reads only the rest.
            prompt[row] = max(1.0, prompt[row] - tokens)
        with np.errstate(divide="ignore", invalid="ignore"):
            read_s = (columns["backlog"] + prompt) / columns["prefill_rate"] * columns["prefill_scale"]
        token_s = (columns["alone_s"] + columns["slope_s"] * running) * self._decode_scale()
        result: Column = read_s + token_s * output_tokens + columns["penalty_s"]
        return result

    def allowed(self, ask: RouteRequest, now_s: float) -> npt.NDArray[np.bool_]:
        """Return a mask of the providers that may and can take ``ask`` at once."""
        columns = self._columns
        ok: npt.NDArray[np.bool_] = columns["slots"] - columns["running"] - columns["foreign"] >= 1
        ok &= (columns["open"] > 0) & (columns["closed_until_s"] <= now_s)
        # After a failure, a provider gets one request at a time until one ends well.
        ok &= (columns["penalty_s"] == 0) | (columns["running"] == 0)
        return ok & self._suited(ask)

    def could_ever(self, ask: RouteRequest) -> bool:
        """Return whether any provider may take ``ask`` once it is free."""
        return bool((self._suited(ask) & (self._columns["open"] > 0)).any())

    def _suited(self, ask: RouteRequest) -> npt.NDArray[np.bool_]:
        columns = self._columns
        ok: npt.NDArray[np.bool_] = columns["level"] >= float(ask.level)
        ok &= columns["slots"] > 0
        # The length of a prompt is guessed from its bytes. If it seems too long for every provider, those
        # with the longest context may take it, because their engine counts exactly.
        longest = columns["max_context"][ok].max(initial=0.0)
        ok &= columns["max_context"] >= min(ask.prompt_tokens + 1, longest)
        for name in ask.excluded:
            if (row := self._index.get(name)) is not None:
                ok[row] = False
        if ask.trusted is not None and (rows := self._rows_of(ask.trusted)):
            trusted = np.zeros(len(ok), dtype=np.bool_)
            trusted[list(rows)] = True
            ok &= trusted
        return ok

    def _rows_of(self, trusted: Trusted) -> set[int]:
        """Return the rows that a client trusts, so that it need not ask again.

        A client that sends only to these verifies what it gets by itself.
        """
        keys = self._of_key
        found = [keys[b"i" + one] for one in trusted.identities if b"i" + one in keys]
        found += [keys[b"o" + one] for one in trusted.operators if b"o" + one in keys]
        return set().union(*found)

    def reopens_s(self, now_s: float) -> float | None:
        """Return when the next closed provider may be tried again, or None."""
        until = self._columns["closed_until_s"]
        later = until[(until > now_s) & (self._columns["open"] > 0)]
        return float(later.min()) if len(later) else None

    def served_per_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the requests of this size that all providers finish in a second, with every slot taken."""
        columns = self._columns
        taken = (columns["open"] > 0) & (columns["slots"] > 0)
        if not taken.any():
            return 0.0
        slots = columns["slots"][taken]
        token_s = columns["alone_s"][taken] + columns["slope_s"][taken] * (slots - 1)
        decode_s = token_s * self._decode_scale()[taken] * output_tokens
        read_s = prompt_tokens / columns["prefill_rate"][taken] * columns["prefill_scale"][taken]
        # A provider reads one prompt after the other, while it decodes for all.
        return float((1 / np.maximum(read_s, (read_s + decode_s) / slots)).sum())

    def name(self, row: int) -> str:
        """Return the name of the row's provider."""
        name = self._names[row]
        assert name is not None, "the row is free"
        return name

    def names(self) -> Collection[str]:
        """Return the names of all providers here."""
        return self._index.keys()

    def column(self, name: str) -> Column:
        """Return a column as it stands, for policies and pictures. The caller must not write to it."""
        return self._columns[name]

    def _decode_scale(self) -> Column:
        """Return, for each provider, the measured seconds of a token over the offered ones.

        The measure is the answers seen here. The provider's own heartbeats count only if they are slower, or
        if nothing was answered yet. So no report makes a provider look faster than it was.
        """
        scale = np.maximum(self._columns["decode_scale"], self._columns["said_scale"])
        return np.where(scale > 0, scale, 1.0)

    def _token_s(self, row: int, running: float) -> float:
        columns = self._columns
        found: float = columns["alone_s"][row] + columns["slope_s"][row] * (max(1.0, running) - 1)
        return found

    def _correct(self, column: str, row: int, seen_s: float, offered_s: float) -> None:
        if offered_s <= 0 or seen_s <= 0:
            return
        array = self._columns[column]
        # Before the first measurement, the offer stands.
        before = array[row] or 1.0
        array[row] = before + _MEMORY * (_bounded(seen_s / offered_s) - before)

    def _grow(self) -> None:
        size = len(self._names)
        for name, array in self._columns.items():
            self._columns[name] = np.concatenate((array, np.zeros(size * (_GROWTH - 1))))
        self._names.extend([None] * (size * (_GROWTH - 1)))
        self._free.extend(range(size * _GROWTH - 1, size - 1, -1))


def _keys_of(owner: Owner) -> list[bytes]:
    return [b"i" + owner.identity, *([] if owner.operator is None else [b"o" + owner.operator])]


def _bounded(scale: float) -> float:
    return min(_MOST_SCALE, max(_LEAST_SCALE, scale))
