from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from convoy.api.refusals import Conflict, NoBalance
from convoy.errors import ConfigError, RequestError
from convoy.fleet.books.ledger import KEY_LIFE_S, MAX_SERVED, AccountUsage, Bill, Hold, Ledger
from convoy.fleet.books.price import MAX_MICRO, Price
from convoy.fleet.books.store import Store
from convoy.fleet.books.tables import CHARGES

HOLD = Hold("r1", "ann", "demo", 600, b"h" * 32)
BILL = Bill("p1", 10, 20, 250)


@pytest.fixture
def ledger(store: Store) -> Ledger:
    made = Ledger(store, "here")
    made.open_account("ann")
    made.credit("ann", 1000)
    return made


def test_a_request_holds_its_worst_case_and_is_charged_what_it_came_to(ledger: Ledger) -> None:
    ledger.reserve(HOLD)
    assert ledger.balance("ann") == 400
    assert ledger.settle("r1", BILL) == 250
    assert ledger.balance("ann") == 750
    assert ledger.usage() == [AccountUsage("ann", "demo", 1, 10, 20, 250)]
    assert ledger.check() == []


def test_a_bill_is_never_more_than_what_was_held(ledger: Ledger) -> None:
    ledger.reserve(HOLD)
    assert ledger.settle("r1", replace(BILL, cost_micro=10**9)) == 600
    assert ledger.balance("ann") == 400


def test_what_was_settled_or_released_stays_so(ledger: Ledger) -> None:
    ledger.reserve(HOLD)
    ledger.settle("r1", BILL)
    assert ledger.settle("r1", BILL) == 0
    ledger.release("r1")
    ledger.release("never held")
    assert ledger.balance("ann") == 750
    assert ledger.check() == []


def test_an_account_with_too_little_is_refused_with_both_amounts(ledger: Ledger) -> None:
    ledger.reserve(HOLD)
    with pytest.raises(NoBalance, match="may cost 600, and ann has 400"):
        ledger.reserve(replace(HOLD, request_id="r2"))
    assert ledger.balance("ann") == 400
    ledger.release("r1")
    assert ledger.balance("ann") == 1000


def test_a_coordinator_that_starts_again_gives_back_what_it_held_and_no_more(
    ledger: Ledger, database_url: str
) -> None:
    ledger.credit("ann", 10_000)
    ledger.reserve(HOLD)
    ledger.settle("r1", BILL)
    ledger.reserve(replace(HOLD, request_id="r2"))
    other = Store(database_url)
    Ledger(other, "elsewhere").reserve(replace(HOLD, request_id="r3"))
    again = Ledger(other, "here")
    assert again.recover() == 1
    assert again.recover() == 0
    assert again.balance("ann") == 11_000 - 250 - 600  # that of the other coordinator is still held
    assert again.check() == []
    other.close()


def test_a_name_is_of_one_coordinator_on_a_database_at_a_time(store: Store, database_url: str) -> None:
    """The second one would give back what the first one holds."""
    store.claim("here")
    other = Store(database_url)
    with pytest.raises(ConfigError, match="another coordinator runs as 'here'"):
        other.claim("here")
    other.claim("elsewhere")
    other.close()
    store.close()
    third = Store(database_url)
    third.claim("here")
    third.close()


def test_after_a_whole_answer_the_same_key_is_another_request_at_its_price(ledger: Ledger) -> None:
    keyed = replace(HOLD, idempotency_key="k", amount_micro=300)
    ledger.reserve(keyed)
    with pytest.raises(Conflict, match="under way"):
        ledger.reserve(replace(keyed, request_id="r2"))
    ledger.settle("r1", BILL)
    for number in range(2, 4):
        ledger.reserve(replace(keyed, request_id=f"r{number}"))
        assert ledger.settle(f"r{number}", BILL) == 250
    assert ledger.balance("ann") == 1000 - 3 * 250
    assert ledger.usage()[0].requests == 3
    assert ledger.check() == []


def test_an_answer_whose_end_did_not_arrive_is_repeated_for_nothing(ledger: Ledger) -> None:
    keyed = replace(HOLD, idempotency_key="k")
    ledger.reserve(keyed)
    ledger.settle("r1", BILL)
    ledger.undelivered("r1")
    ledger.reserve(replace(keyed, request_id="r2"))
    assert ledger.settle("r2", BILL) == 0
    assert ledger.balance("ann") == 750
    ledger.reserve(replace(keyed, request_id="r3"))  # that one arrived
    assert ledger.settle("r3", BILL) == 250


def test_a_retry_of_an_answer_that_was_left_early_pays_what_it_costs_more(ledger: Ledger) -> None:
    keyed = replace(HOLD, idempotency_key="k")
    left = replace(BILL, cost_micro=100, delivered=False)
    ledger.reserve(keyed)
    ledger.settle("r1", left)
    ledger.reserve(replace(keyed, request_id="r2"))
    assert ledger.balance("ann") == 400  # as much is held for it as for the first one, less what that cost
    ledger.release("r2")  # a try that nothing came of changes nothing
    ledger.reserve(replace(keyed, request_id="r3"))
    assert ledger.settle("r3", BILL) == 150
    assert ledger.balance("ann") == 750
    assert ledger.check() == []


def test_answers_of_a_key_that_are_not_whole_are_few(ledger: Ledger) -> None:
    keyed = replace(HOLD, idempotency_key="k")
    for number in range(MAX_SERVED):
        ledger.reserve(replace(keyed, request_id=f"r{number}"))
        ledger.settle(f"r{number}", replace(BILL, delivered=False))
    with pytest.raises(Conflict, match=f"served {MAX_SERVED} times"):
        ledger.reserve(replace(keyed, request_id="once too often"))
    assert ledger.balance("ann") == 750


def test_of_those_that_ask_with_one_key_at_once_one_is_served(ledger: Ledger) -> None:
    keyed = replace(HOLD, idempotency_key="k", amount_micro=10)
    found: list[object] = []
    begin = threading.Barrier(8)

    def ask(number: int) -> None:
        begin.wait(30)
        for turn in range(3):
            try:
                ledger.reserve(replace(keyed, request_id=f"t{number}-{turn}"))
                found.append("held")
            except Exception as error:  # noqa: BLE001 - which kind is what is asserted
                found.append(type(error))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {"held", Conflict}
    assert found.count("held") == 1


def names_kept(store: Store) -> list[tuple[str | None, bytes | None]]:
    with store.read() as db:
        rows = db.execute(
            select(CHARGES.c.idempotency_key, CHARGES.c.body_mac).order_by(CHARGES.c.request_id)
        )
        return [(key, None if mac is None else bytes(mac)) for key, mac in rows]


def test_a_body_has_a_name_for_a_day_and_only_with_a_key(store: Store) -> None:
    now_s = [1_000_000.0]
    ledger = Ledger(store, "here", now=lambda: now_s[0])
    ledger.open_account("ann")
    ledger.credit("ann", 10_000)
    keyed = replace(HOLD, request_id="r2", idempotency_key="k")
    for hold in (HOLD, keyed):
        ledger.reserve(hold)
        ledger.settle(hold.request_id, BILL)
    assert names_kept(store) == [(None, None), ("k", b"h" * 32)]
    ledger.reserve(replace(keyed, request_id="r3"))  # its key is the new one's: the old one keeps nothing
    assert names_kept(store) == [(None, None), (None, None), ("k", b"h" * 32)]
    now_s[0] += KEY_LIFE_S
    assert ledger.forget_keys() == 0  # it runs still
    ledger.settle("r3", BILL)
    assert ledger.forget_keys() == 1
    assert names_kept(store) == [(None, None)] * 3


def test_a_key_of_yesterday_is_a_new_one_though_nothing_was_swept(store: Store) -> None:
    now_s = [1_000_000.0]
    ledger = Ledger(store, "here", now=lambda: now_s[0])
    ledger.open_account("ann")
    ledger.credit("ann", 10_000)
    keyed = replace(HOLD, idempotency_key="k")
    ledger.reserve(keyed)
    ledger.settle("r1", replace(BILL, delivered=False))
    now_s[0] += KEY_LIFE_S
    ledger.reserve(replace(keyed, request_id="r2", body_mac=b"i" * 32))
    assert ledger.settle("r2", BILL) == 250


def test_a_key_that_another_coordinator_took_is_not_compared_under_this_ones_secret(
    store: Store, ledger: Ledger
) -> None:
    keyed = replace(HOLD, idempotency_key="k")
    ledger.reserve(keyed)
    ledger.settle("r1", replace(BILL, delivered=False))
    other = Ledger(store, "elsewhere")
    other.reserve(replace(keyed, request_id="r2", body_mac=b"i" * 32))
    assert other.settle("r2", BILL) == 0


def test_a_key_means_one_body_of_one_account(ledger: Ledger) -> None:
    keyed = replace(HOLD, idempotency_key="k")
    ledger.reserve(keyed)
    ledger.settle("r1", BILL)
    with pytest.raises(Conflict, match="another body"):
        ledger.reserve(replace(keyed, request_id="r2", body_mac=b"i" * 32))
    ledger.open_account("bob")
    ledger.credit("bob", 1000)
    ledger.reserve(replace(keyed, request_id="r3", account="bob"))


def test_a_key_whose_request_was_never_served_may_be_used_again(ledger: Ledger) -> None:
    keyed = replace(HOLD, idempotency_key="k")
    ledger.reserve(keyed)
    ledger.release("r1")
    ledger.reserve(replace(keyed, request_id="r2", body_mac=b"i" * 32))
    assert ledger.settle("r2", BILL) == 250


@pytest.mark.parametrize("amount", [-1, 0, MAX_MICRO + 1, 1 << 70])
def test_no_credit_is_below_one_or_beyond_all_sense(ledger: Ledger, amount: int) -> None:
    with pytest.raises(ConfigError):
        ledger.credit("ann", amount)
    assert ledger.balance("ann") == 1000


def test_no_hold_is_below_zero_or_beyond_all_sense(ledger: Ledger) -> None:
    for amount in (-1, MAX_MICRO + 1):
        with pytest.raises(RequestError):
            ledger.reserve(replace(HOLD, amount_micro=amount))
    with pytest.raises(ConfigError, match="limit"):
        ledger.credit("ann", MAX_MICRO)


def test_accounts_that_are_not_there_or_twice_are_refused(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="no account bob"):
        ledger.credit("bob", 1)
    with pytest.raises(ConfigError, match="no account bob"):
        ledger.reserve(replace(HOLD, account="bob"))
    with pytest.raises(ConfigError, match="already"):
        ledger.open_account("ann")
    for name in ("", "x" * 65, "a\nb", "é"):
        with pytest.raises(ConfigError):
            ledger.open_account(name)


def test_two_threads_cannot_have_the_same_money(ledger: Ledger) -> None:
    held: list[bool] = []

    def ask(number: int) -> None:
        with contextlib.suppress(NoBalance):
            ledger.reserve(replace(HOLD, request_id=f"t{number}", amount_micro=300))
            held.append(True)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 3
    assert ledger.balance("ann") == 100
    assert ledger.check() == []


def test_prices_are_rounded_up_and_bounded() -> None:
    price = Price(prompt_micro=1_000_000, completion_micro=2_500_000)
    assert price.cost(10, 4) == 20
    assert price.cost(1, 1) == 4
    assert price.cost(0, 0) == 0
    with pytest.raises(ConfigError):
        price.cost(-1, 0)
    with pytest.raises(ConfigError):
        price.cost(1 << 60, 0)
    with pytest.raises(ConfigError):
        Price(-1, 0).check()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "release", "credit", "recover"]),
        st.integers(0, 5),
        st.integers(0, 900),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS)
def test_a_balance_is_the_sum_of_its_entries_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, int]]
) -> None:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('db')}/fleet.db")
    ledger = Ledger(store, "here")
    ledger.open_account("ann")
    balance, held, number = 0, dict[str, int](), 0
    for kind, which, amount in events:
        names = sorted(held)
        name = names[which % len(names)] if names else "none"
        if kind == "reserve":
            number += 1
            try:
                ledger.reserve(replace(HOLD, request_id=f"r{number}", amount_micro=amount))
                held[f"r{number}"] = amount
                balance -= amount
            except NoBalance:
                assert amount > balance
        elif kind == "settle":
            cost = ledger.settle(name, replace(BILL, cost_micro=amount))
            balance += held.pop(name, 0) - cost
        elif kind == "release":
            ledger.release(name)
            balance += held.pop(name, 0)
        elif kind == "credit":
            balance += amount + 1
            ledger.credit("ann", amount + 1)
        else:
            assert ledger.recover() == len(held)
            balance += sum(held.values())
            held.clear()
        assert ledger.balance("ann") == balance
    assert ledger.check() == []
    store.close()


def test_who_only_looks_waits_for_no_writer(store: Store, ledger: Ledger) -> None:
    with store.write():
        assert ledger.balance("ann") == 1000
        assert ledger.check() == []


def test_what_settles_is_on_the_disk_and_a_hold_need_not_be(
    ledger: Ledger, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not database_url.startswith("sqlite") or sys.platform != "linux":
        pytest.skip("PostgreSQL syncs by itself; elsewhere nothing says which file is")
    synced: list[str] = []
    really = os.fsync

    def sync(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        really(number)

    monkeypatch.setattr(os, "fsync", sync)
    ledger.reserve(HOLD)
    assert synced == []
    ledger.settle("r1", BILL)
    assert synced == [database_url.removeprefix("sqlite:///") + "-wal"]


def test_what_an_engine_refused_is_no_use_of_it(ledger: Ledger) -> None:
    for name, bill in (("answered", Bill("p1", 7, 2, 9)), ("refused", Bill("p1", 0, 0, 0))):
        ledger.reserve(replace(HOLD, request_id=name))
        ledger.settle(name, bill)
    assert [(one.requests, one.prompt_tokens) for one in ledger.usage("ann")] == [(1, 7)]
