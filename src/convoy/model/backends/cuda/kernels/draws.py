"""Draw one token of each row where the logits are.

A row is cut into parts of `PART` tokens. A token has a mass: its weight e^((logit - peak) / temperature) as a
whole number of 2^-bits. Sums of masses are therefore the same in every order, so a token depends on no other
row, and partial sums may be added by atomic operations. Cuts by top-k and top-p are the place of one token in
the order (logit, lower id first): its key. No row is sorted. A histogram over `BINS` intervals finds the
interval of the key, and a binary search finds the key among the interval's tokens.

The host's definition (`sampling.sample`) adds float64 weights. A number within the error of either sum from
a limit is `AMBIGUOUS`, and the host draws that row.
"""

from __future__ import annotations

import triton.language as tl

from convoy.model.backends.cuda.kernels.language import kernel, kernel_of_any

# Tokens that one program reads at once.
PART = 4096
# Intervals of logits that a search begins with.
BINS = 256
# Columns of a row's parameters, float64. A mask of -1 is none; a limit of 0 tokens is none.
TEMPERATURE, TOP_P, MIN_P, RANDOM, TOP_K, MASK = 0, 1, 2, 3, 4, 5
COLUMNS = 6
# A row's status. 0 is a token; the host takes a row with any other.
NOT_FINITE, NO_TOKEN, AMBIGUOUS = 1, 2, 4

_TEMPERATURE, _TOP_P, _MIN_P = tl.constexpr(TEMPERATURE), tl.constexpr(TOP_P), tl.constexpr(MIN_P)
_RANDOM, _TOP_K, _MASK = tl.constexpr(RANDOM), tl.constexpr(TOP_K), tl.constexpr(MASK)
_COLUMNS, _BINS, _PART = tl.constexpr(COLUMNS), tl.constexpr(BINS), tl.constexpr(PART)
_NO_TOKEN, _AMBIGUOUS = tl.constexpr(NO_TOKEN), tl.constexpr(AMBIGUOUS)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
# Weights below e^-32 have the mass 0.
_DEEPEST = tl.constexpr(32.0)

# fmt: off


@kernel_of_any("count")
def edit_kernel(work: tl.tensor, flags: tl.tensor, edits: tl.tensor, count: tl.tensor, stride: tl.tensor,
                BLOCK: tl.constexpr) -> None:
    """Apply penalties, biases and bans to single logits. Grid (edits / BLOCK,)."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = lane < count
    row = tl.load(edits + lane, mask=known, other=0).to(tl.int64)
    token = tl.load(edits + count + lane, mask=known, other=0)
    banned = tl.load(edits + 2 * count + lane, mask=known, other=0)
    factor = tl.load(edits + 3 * count + lane, mask=known, other=0).to(tl.float32, bitcast=True)
    less = tl.load(edits + 4 * count + lane, mask=known, other=0).to(tl.float32, bitcast=True)
    more = tl.load(edits + 5 * count + lane, mask=known, other=0).to(tl.float32, bitcast=True)
    found = tl.load(work + row * stride + token, mask=known, other=0.0)
    found = tl.where(found > 0, tl.div_rn(found, factor), found * factor)
    found = (found - less) + more
    tl.atomic_or(flags + row, _NOT_FINITE, mask=known & (found - found != 0))
    found = tl.where(banned != 0, float("-inf"), found)
    tl.store(work + row * stride + token, found, mask=known)


@kernel
def peak_kernel(peaks: tl.tensor, lows: tl.tensor, places: tl.tensor, flags: tl.tensor, keys: tl.tensor,
                work: tl.tensor, raw: tl.tensor, table: tl.tensor, masks: tl.tensor, stride: tl.tensor,
                raw_stride: tl.tensor, WORDS: tl.constexpr, EDITED: tl.constexpr,
                WIDTH: tl.constexpr) -> None:
    """Find the best and the least logit of one part, and whether all are finite. Grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * _PART + tl.arange(0, _PART)
    known = token < WIDTH
    found = tl.load(work + row * stride + token, mask=known, other=float("-inf")).to(tl.float32)
    first = found
    if EDITED:
        first = tl.load(raw + row * raw_stride + token, mask=known, other=0.0).to(tl.float32)
    bad = tl.max((known & (first - first != 0)).to(tl.int32), 0)
    if bad > 0:
        tl.atomic_or(flags + row, _NOT_FINITE)
    if part == 0:
        # No limit is known yet, so each key is within it.
        tl.store(keys + row, -0x7FFFFFFFFFFFFFFF - 1)
    kept = _allowed(table, masks, row, token, known, WORDS)
    found = tl.where(kept, found, float("-inf"))
    peak = tl.max(found, 0)
    at = row * tl.num_programs(1) + part
    tl.store(peaks + at, peak)
    tl.store(lows + at, tl.min(tl.where(found == float("-inf"), float("inf"), found), 0))
    tl.store(places + at, tl.min(tl.where(found == peak, token, WIDTH), 0))


@kernel
def bin_kernel(counts: tl.tensor, sums: tl.tensor, work: tl.tensor, table: tl.tensor, masks: tl.tensor,
               peaks: tl.tensor, lows: tl.tensor, stride: tl.tensor, SCALE: tl.constexpr,
               COUNTED: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr) -> None:
    """Add one part to a row's histogram, [BINS] numbers of tokens and masses. Grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    if _cuts(table, row):
        peak, low = _ends(peaks, lows, row, tl.num_programs(1), PARTS)
        token = tl.program_id(1) * _PART + tl.arange(0, _PART)
        found = _logits(work, table, masks, row, token, stride, WORDS, WIDTH)
        mass = _masses(found, table, row, peak, SCALE)
        bins = _bins(found, table, row, peak, low)
        # Most of a part's tokens have different intervals, so sums within the program would cost more.
        if COUNTED:
            tl.atomic_add(counts + row * _BINS + bins, 1, mask=mass > 0)
        tl.atomic_add(sums + row * _BINS + bins, mass, mask=mass > 0)


@kernel
def collect_kernel(found_tokens: tl.tensor, numbers: tl.tensor, keys: tl.tensor, totals: tl.tensor,
                   counts: tl.tensor, sums: tl.tensor, work: tl.tensor, table: tl.tensor, masks: tl.tensor,
                   peaks: tl.tensor, lows: tl.tensor, stride: tl.tensor,
                   BY_MASS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
                   PARTS: tl.constexpr) -> None:
    """Collect the tokens of the interval that a limit lies in. Grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    chosen, _needed, _before, _total = _limit(table, totals, counts, sums, row, BY_MASS)
    if chosen < _BINS:
        peak, low = _ends(peaks, lows, row, tl.num_programs(1), PARTS)
        token = tl.program_id(1) * _PART + tl.arange(0, _PART)
        found = _logits(work, table, masks, row, token, stride, WORDS, WIDTH)
        # Tokens without mass come last in an interval, so they move no limit.
        here = (_bins(found, table, row, peak, low) == chosen) & (found > float("-inf"))
        here = here & (_keys(found, token) >= tl.load(keys + row))
        number = tl.sum(here.to(tl.int32), 0)
        if number > 0:
            start = tl.atomic_add(numbers + row, number)
            place = start + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(found_tokens + row * WIDTH + place, token, mask=here)


@kernel
def limit_kernel(keys: tl.tensor, totals: tl.tensor, flags: tl.tensor, found_tokens: tl.tensor,
                 numbers: tl.tensor, counts: tl.tensor, sums: tl.tensor, work: tl.tensor, table: tl.tensor,
                 peaks: tl.tensor, lows: tl.tensor, stride: tl.tensor, parts: tl.tensor,
                 SCALE: tl.constexpr, BY_MASS: tl.constexpr, WIDTH: tl.constexpr,
                 PARTS: tl.constexpr) -> None:
    """Find the key of the last token within a limit, and the mass of the row up to it. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    chosen, needed, before, total = _limit(table, totals, counts, sums, row, BY_MASS)
    if chosen < _BINS:
        peak, _low = _ends(peaks, lows, row, parts, PARTS)
        number = tl.load(numbers + row)
        lane = tl.arange(0, _PART)
        tokens = found_tokens + row * WIDTH
        line = work + row * stride
        key, mass = _chunk(tokens, line, table, row, peak, SCALE, lane, number)
        lower = tl.min(tl.where(lane < number, key, 0x7FFFFFFFFFFFFFFF), 0)
        upper = tl.max(key, 0)
        for start in range(_PART, number, _PART):
            key, mass = _chunk(tokens, line, table, row, peak, SCALE, start + lane, number)
            lower = tl.minimum(lower, tl.min(tl.where(start + lane < number, key, 0x7FFFFFFFFFFFFFFF), 0))
            upper = tl.maximum(upper, tl.max(key, 0))
        upper += 1
        # Each search halves the keys from ``lower``, within the limit, to ``upper``, beyond it.
        key, mass = _chunk(tokens, line, table, row, peak, SCALE, lane, number)
        while lower + 1 < upper:
            # Their sum may be beyond int64.
            middle = (lower >> 1) + (upper >> 1) + (lower & upper & 1)
            reached = before + tl.sum(_worth(key >= middle, mass, BY_MASS), 0)
            for start in range(_PART, number, _PART):
                more, weight = _chunk(tokens, line, table, row, peak, SCALE, start + lane, number)
                reached += tl.sum(_worth(more >= middle, weight, BY_MASS), 0)
            if reached >= needed:
                lower = middle
            else:
                upper = middle
        bin_lane = tl.arange(0, _BINS)
        masses = tl.load(sums + row * _BINS + bin_lane)
        above = tl.sum(tl.where(bin_lane < chosen, masses, 0), 0)
        short = above + tl.sum(tl.where(key > lower, mass, 0), 0)
        own = tl.sum(tl.where(key == lower, mass, 0), 0)
        for start in range(_PART, number, _PART):
            more, weight = _chunk(tokens, line, table, row, peak, SCALE, start + lane, number)
            short += tl.sum(tl.where(more > lower, weight, 0), 0)
            own += tl.sum(tl.where(more == lower, weight, 0), 0)
        if BY_MASS:
            error = _error(total, WIDTH)
            near = ((needed - short <= error) & (short > 0)) | (short + own - needed < error)
            if near:
                tl.atomic_or(flags + row, _AMBIGUOUS)
        tl.store(keys + row, lower)
        tl.store(totals + row, short + own)


@kernel
def mass_kernel(parts_mass: tl.tensor, flags: tl.tensor, keys: tl.tensor, work: tl.tensor, table: tl.tensor,
                masks: tl.tensor, peaks: tl.tensor, lows: tl.tensor, stride: tl.tensor,
                SCALE: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr) -> None:
    """Add the masses of one part's tokens that may be drawn. Grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    at = row * tl.num_programs(1) + tl.program_id(1)
    if tl.load(table + row * _COLUMNS + _TEMPERATURE) > 0:
        peak, _low = _ends(peaks, lows, row, tl.num_programs(1), PARTS)
        token = tl.program_id(1) * _PART + tl.arange(0, _PART)
        found = _logits(work, table, masks, row, token, stride, WORDS, WIDTH)
        mass = _masses(found, table, row, peak, SCALE)
        mass = tl.where(_keys(found, token) >= tl.load(keys + row), mass, 0)
        tl.store(parts_mass + at, tl.sum(mass, 0))
        least = tl.load(table + row * _COLUMNS + _MIN_P)
        if least > 0:
            # A weight this near to min-p is kept by one exponential and dropped by another.
            weight = _weights(found, table, row, peak)
            gap = tl.abs(weight - least)
            near = (gap <= least * 8.881784197001252e-16) & (found < peak)
            if tl.max(near.to(tl.int32), 0) > 0:
                tl.atomic_or(flags + row, _AMBIGUOUS)


@kernel
def pick_kernel(out: tl.tensor, parts_mass: tl.tensor, flags: tl.tensor, keys: tl.tensor, places: tl.tensor,
                work: tl.tensor, table: tl.tensor, masks: tl.tensor, peaks: tl.tensor, lows: tl.tensor,
                stride: tl.tensor, parts: tl.tensor, SCALE: tl.constexpr, WORDS: tl.constexpr,
                WIDTH: tl.constexpr, PARTS: tl.constexpr) -> None:
    """Write the token of one row, and its status behind all tokens. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PARTS)
    known = lane < parts
    peak, _low = _ends(peaks, lows, row, parts, PARTS)
    status = tl.load(flags + row)
    each = tl.load(peaks + row * parts + lane, mask=known, other=float("-inf"))
    place = tl.load(places + row * parts + lane, mask=known, other=WIDTH)
    chosen = tl.min(tl.where(each == peak, place, WIDTH), 0)
    if peak == float("-inf"):
        status |= _NO_TOKEN
    elif tl.load(table + row * _COLUMNS + _TEMPERATURE) > 0:
        held = tl.load(parts_mass + row * parts + lane, mask=known, other=0)
        total = tl.sum(held, 0)
        wanted = (tl.load(table + row * _COLUMNS + _RANDOM) * total.to(tl.float64)).to(tl.int64)
        wanted = tl.minimum(wanted, total - 1)
        part = tl.sum((known & (tl.cumsum(held, 0) <= wanted)).to(tl.int32), 0)
        before = tl.sum(tl.where(lane < part, held, 0), 0)
        token = part * _PART + tl.arange(0, _PART)
        found = _logits(work, table, masks, row, token, stride, WORDS, WIDTH)
        mass = _masses(found, table, row, peak, SCALE)
        mass = tl.where(_keys(found, token) >= tl.load(keys + row), mass, 0)
        reached = before + tl.cumsum(mass, 0)
        chosen = part * _PART + tl.sum((reached <= wanted).to(tl.int32), 0)
        below = tl.maximum(before, tl.max(tl.where(reached <= wanted, reached, 0), 0))
        above = tl.min(tl.where(reached > wanted, reached, total), 0)
        error = _error(total, WIDTH)
        if ((wanted - below <= error) & (below > 0)) | ((above - wanted <= error) & (above < total)):
            status |= _AMBIGUOUS
    tl.store(out + row, tl.minimum(chosen, WIDTH - 1))
    tl.store(out + tl.num_programs(0) + row, status)


@kernel
def top_kernel(best: tl.tensor, totals: tl.tensor, raw: tl.tensor, chosen: tl.tensor, stride: tl.tensor,
               TOP: tl.constexpr, WIDTH: tl.constexpr) -> None:
    """Find the keys of one part's best tokens, and its sum of exponentials. Grid (chosen rows, parts)."""
    row = tl.load(chosen + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    token = tl.program_id(1) * _PART + tl.arange(0, _PART)
    known = token < WIDTH
    found = tl.load(raw + row * stride + token, mask=known, other=float("-inf")).to(tl.float32)
    peak = tl.max(found, 0)
    share = tl.exp(tl.where(known, found - peak, float("-inf")).to(tl.float64))
    tl.store(totals + 2 * at, peak.to(tl.float64))
    tl.store(totals + 2 * at + 1, tl.sum(share, 0))
    key = tl.where(known, _keys(found, token), -0x7FFFFFFFFFFFFFFF - 1)
    for place in range(TOP):
        greatest = tl.max(key, 0)
        tl.store(best + at * TOP + place, greatest)
        key = tl.where(key == greatest, -0x7FFFFFFFFFFFFFFF - 1, key)


@kernel
def merge_kernel(out: tl.tensor, best: tl.tensor, totals: tl.tensor, tokens: tl.tensor, raw: tl.tensor,
                 chosen: tl.tensor, stride: tl.tensor, parts: tl.tensor, TOP: tl.constexpr,
                 PARTS: tl.constexpr, SIZE: tl.constexpr) -> None:
    """Write the log-probability of a row's token, then ids and those of its best tokens. Grid (rows,)."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(chosen + at).to(tl.int64)
    lane = tl.arange(0, PARTS)
    known = lane < parts
    peaks = tl.load(totals + 2 * (at * parts + lane), mask=known, other=float("-inf"))
    sums = tl.load(totals + 2 * (at * parts + lane) + 1, mask=known, other=0.0)
    peak = tl.max(peaks, 0)
    total = peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))
    token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + at * (1 + 2 * TOP), tl.load(raw + row * stride + token).to(tl.float64) - total)
    place = tl.arange(0, SIZE)
    key = tl.load(best + at * parts * TOP + place, mask=place < parts * TOP, other=-0x7FFFFFFFFFFFFFFF - 1)
    for one in range(TOP):
        greatest = tl.max(key, 0)
        token = 0xFFFFFFFF - (greatest & 0xFFFFFFFF)
        tl.store(out + at * (1 + 2 * TOP) + 1 + one, token.to(tl.float64))
        logit = tl.load(raw + row * stride + token).to(tl.float64)
        tl.store(out + at * (1 + 2 * TOP) + 1 + TOP + one, logit - total)
        key = tl.where(key == greatest, -0x7FFFFFFFFFFFFFFF - 1, key)


@kernel
def _allowed(table: tl.tensor, masks: tl.tensor, row: tl.tensor, token: tl.tensor, known: tl.tensor,
             WORDS: tl.constexpr) -> tl.tensor:
    """Return which of ``known`` tokens a row's mask has."""
    kept = known
    if WORDS > 0:
        mask = tl.load(table + row * _COLUMNS + _MASK).to(tl.int64)
        if mask >= 0:
            word = tl.load(masks + mask * WORDS + token // 32, mask=known, other=0)
            kept = known & (((word >> (token % 32)) & 1) != 0)
    return kept


@kernel
def _logits(work: tl.tensor, table: tl.tensor, masks: tl.tensor, row: tl.tensor, token: tl.tensor,
            stride: tl.tensor, WORDS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the logits of ``token``, -inf where they are not allowed."""
    kept = _allowed(table, masks, row, token, token < WIDTH, WORDS)
    return tl.load(work + row * stride + token, mask=kept, other=float("-inf")).to(tl.float32)


@kernel
def _ends(peaks: tl.tensor, lows: tl.tensor, row: tl.tensor, parts: tl.tensor,
          PARTS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return a row's greatest and least logit."""
    lane = tl.arange(0, PARTS)
    peak = tl.load(peaks + row * parts + lane, mask=lane < parts, other=float("-inf"))
    low = tl.load(lows + row * parts + lane, mask=lane < parts, other=float("inf"))
    return tl.max(peak, 0), tl.min(low, 0)


@kernel
def _weights(found: tl.tensor, table: tl.tensor, row: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """Return the float64 weights of logits."""
    temperature = tl.load(table + row * _COLUMNS + _TEMPERATURE)
    scaled = (found.to(tl.float64) - peak.to(tl.float64)) / temperature
    return tl.exp(tl.maximum(scaled, -64.0))


@kernel
def _masses(found: tl.tensor, table: tl.tensor, row: tl.tensor, peak: tl.tensor,
            SCALE: tl.constexpr) -> tl.tensor:
    """Return the masses of logits, int64; 0 below min-p."""
    weight = _weights(found, table, row, peak)
    least = tl.load(table + row * _COLUMNS + _MIN_P)
    mass = (weight * SCALE + 0.5).to(tl.int64)
    return tl.where((weight < least) | (found == float("-inf")), 0, mass)


@kernel
def _bins(found: tl.tensor, table: tl.tensor, row: tl.tensor, peak: tl.tensor, low: tl.tensor) -> tl.tensor:
    """Return the intervals of logits, from the best."""
    temperature = tl.load(table + row * _COLUMNS + _TEMPERATURE)
    high = peak.to(tl.float64)
    span = tl.minimum(high - low.to(tl.float64), _DEEPEST * temperature)
    place = (high - found.to(tl.float64)) * (_BINS / tl.maximum(span, 1e-300))
    # What lies beyond the span, and what rounds to its end, belongs to the last interval.
    return tl.minimum(place, _BINS - 1.0).to(tl.int32)


@kernel
def _keys(found: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return the places of tokens in the order (logit, lower id first), int64."""
    # Both zeros are equal.
    bits = tl.where(found == 0, 0.0, found).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@kernel
def _chunk(tokens: tl.tensor, line: tl.tensor, table: tl.tensor, row: tl.tensor, peak: tl.tensor,
           SCALE: tl.constexpr, lane: tl.tensor, number: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return keys and masses of collected tokens; the least key and no mass beyond ``number``."""
    token = tl.load(tokens + lane, mask=lane < number, other=0)
    found = tl.load(line + token, mask=lane < number, other=float("-inf")).to(tl.float32)
    mass = _masses(found, table, row, peak, SCALE)
    return tl.where(lane < number, _keys(found, token), -0x7FFFFFFFFFFFFFFF - 1), mass


@kernel
def _worth(inside: tl.tensor, mass: tl.tensor, BY_MASS: tl.constexpr) -> tl.tensor:
    """Return what tokens count for a limit: their mass, or 1."""
    return tl.where(inside, mass, 0) if BY_MASS else inside.to(tl.int64)


@kernel
def _cuts(table: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Tell whether a row has a limit."""
    at = table + row * _COLUMNS
    return (tl.load(at + _TEMPERATURE) > 0) & ((tl.load(at + _TOP_K) > 0) | (tl.load(at + _TOP_P) < 1))


@kernel
def _limit(table: tl.tensor, totals: tl.tensor, counts: tl.tensor, sums: tl.tensor,
           row: tl.tensor, BY_MASS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the interval of a row's limit, the limit, what lies before the interval, and the row's mass.

    The interval is BINS where the limit keeps all tokens.
    """
    lane = tl.arange(0, _BINS)
    at = table + row * _COLUMNS
    if BY_MASS:
        held = tl.load(sums + row * _BINS + lane)
        share = tl.load(at + _TOP_P)
        limited = (tl.load(at + _TEMPERATURE) > 0) & (share < 1)
        # The mass within top-k; 0 where top-k keeps all tokens.
        total = tl.load(totals + row)
        total = tl.where(total > 0, total, tl.sum(held, 0))
        needed = tl.maximum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), 1)
    else:
        held = tl.load(counts + row * _BINS + lane).to(tl.int64)
        total = tl.sum(held, 0)
        number = tl.load(at + _TOP_K)
        limited = (tl.load(at + _TEMPERATURE) > 0) & (number > 0)
        needed = tl.minimum(number, 2147483647.0).to(tl.int64)
    reached = tl.cumsum(held, 0)
    chosen = tl.where(limited, tl.sum((reached < needed).to(tl.int32), 0), _BINS)
    return chosen, needed, tl.sum(tl.where(lane < chosen, held, 0), 0), total


@kernel
def _error(total: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the greatest difference between sums of masses and the host's sums of float64 weights.

    Each mass is rounded by up to 1/2, and each of the host's sums by 2^-53 of it; both are counted twice.
    """
    return (total.to(tl.float64) * (WIDTH * 2.220446049250313e-16)).to(tl.int64) + WIDTH
