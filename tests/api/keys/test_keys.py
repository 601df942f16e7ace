"""The keys of a server over time: read again, expired, withdrawn; and the identity of a caller."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from convoy.api.keys.keys import KeyRing, anyone, key_of
from convoy.api.refusals import NoBalance, Unauthenticated, WrongKey

ANN, BOB = "the-secret-key-of-ann", "the-secret-key-of-bob"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def write(path: Path, *keys: tuple[str, str], more: str = "") -> Path:
    text = "".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n{more}\n' for name, key in keys)
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(path)
    return path


def test_a_caller_is_named_by_its_key_and_names_never_share_a_salt(tmp_path: Path) -> None:
    ring = KeyRing.open(write(tmp_path / "keys", ("ann", ANN), ("bob", BOB)))
    ann, bob = ring.find(ANN), ring.find(BOB)
    assert (ann.name, bob.name) == ("ann", "bob")
    assert ann.salt != bob.salt
    for wrong in ("", ANN[:-1], f"{ANN}x", "x" * 100_000, "é"):
        with pytest.raises(WrongKey):
            ring.find(wrong)


def test_a_new_file_counts_within_a_second_and_keeps_salt_and_use(tmp_path: Path) -> None:
    clock = Clock()
    file = write(tmp_path / "keys", ("ann", ANN))
    ring = KeyRing.open(file, clock=clock)
    before = ring.find(ANN)
    before.use.begin()
    write(file, ("ann", "a-new-secret-of-ann"), ("bob", BOB), more="requests_per_minute = 7")
    clock.now_s += 1.0
    ring.find(BOB)
    after = ring.find("a-new-secret-of-ann")
    assert (after.salt, after.use.requests, after.use.limits.requests_per_minute) == (before.salt, 1, 7)
    with pytest.raises(WrongKey):
        ring.find(ANN)


def test_the_file_is_looked_at_once_a_second_at_most_and_at_once_when_asked(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("ann", ANN))
    ring = KeyRing.open(file, clock=Clock())
    write(file, ("bob", BOB))
    ring.find(ANN)
    ring.reload()
    ring.find(BOB)
    with pytest.raises(WrongKey):
        ring.find(ANN)


def test_a_spend_limit_goes_on_where_it_was_when_a_key_comes_back(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("ann", ANN), ("bob", BOB), more="total_tokens = 10")
    ring = KeyRing.open(file)
    with ring.find(ANN).use.begin() as request:
        request.hold(6, 10)
        request.used(6, 0, 4)
    write(file, ("bob", BOB), more="total_tokens = 10")
    ring.reload()
    assert "ann" not in str(list(ring.families(anyone())))
    write(file, ("ann", "a-new-secret-of-ann"), more="total_tokens = 10")
    ring.reload()
    with pytest.raises(NoBalance, match="all of the 10 tokens"):
        ring.find("a-new-secret-of-ann").use.begin()


def test_the_use_of_keys_that_left_the_file_is_bounded(tmp_path: Path) -> None:
    names = [f"key{number}" for number in range(5)]
    file = write(tmp_path / "keys", *((name, f"the-secret-key-of-{name}") for name in names))
    ring = KeyRing.open(file, max_gone=2)
    for name in names[1:]:
        ring.find(f"the-secret-key-of-{name}").use.begin()
    write(file, ("ann", ANN))
    ring.reload()
    assert ring.counted == {"ann", "key3", "key4"}


@pytest.mark.parametrize("spoil", ["[[keys]\n", None, "mode"])
def test_a_broken_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, spoil: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file = write(tmp_path / "keys", ("ann", ANN))
    ring = KeyRing.open(file, clock=clock)
    if spoil is None:
        file.unlink()
    elif spoil == "mode":
        write(file, ("bob", BOB)).chmod(0o644)
    else:
        file.write_text(f"{spoil}{BOB}\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now_s += 2
            assert ring.find(ANN).name == "ann"
    (record,) = [one for one in caplog.records if one.name.startswith("convoy")]
    assert str(file) in record.getMessage()
    assert BOB not in record.getMessage()
    write(file, ("bob", BOB))
    clock.now_s += 2
    assert ring.find(BOB).name == "bob"


def test_a_key_ends_when_it_expires(tmp_path: Path) -> None:
    wall = Clock()
    wall.now_s = 1893542399.0
    ring = KeyRing.open(write(tmp_path / "keys", ("ann", ANN), more="expires = 2030-01-02"), now=wall)
    ring.find(ANN)
    wall.now_s += 1
    with pytest.raises(WrongKey, match="expired"):
        ring.find(ANN)


def test_a_part_of_the_process_has_a_key_of_its_own_that_outlives_a_reload(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", ("ann", ANN))
    ring = KeyRing.open(file)
    own = ring.own_key("provider")
    ring.reload()
    assert (ring.find(own).name, ring.find(ANN).name) == ("(provider)", "ann")
    assert ring.find(own).salt != ring.find(ANN).salt


def test_a_key_comes_as_a_bearer_token_or_as_x_api_key() -> None:
    assert key_of(Headers({"authorization": f"bearer {ANN}"})) == ANN
    assert key_of(Headers({"x-api-key": ANN})) == ANN
    assert key_of(Headers({"x-api-key": ANN, "authorization": f"Bearer {ANN}"})) == ANN
    assert key_of(Headers({"x-api-key": ANN, "authorization": "Basic abc"})) == ANN
    with pytest.raises(Unauthenticated, match="two different api keys"):
        key_of(Headers({"x-api-key": ANN, "authorization": f"Bearer {BOB}"}))
    for nothing in ({}, {"authorization": "Bearer "}, {"x-api-key": " "}, {"authorization": ANN}):
        with pytest.raises(Unauthenticated, match="no api key"):
            key_of(Headers(nothing))
