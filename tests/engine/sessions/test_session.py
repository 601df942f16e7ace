"""Sessions over a fake executor: a real engine and real threads, no model."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from convoy.engine.active import PausedWork
from convoy.engine.completion import generate
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.outputs import Output
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.executor import Executor, Kv, StepResult
from convoy.engine.scheduler import GroupLimits, Scheduler, SchedulerLimits
from convoy.engine.sessions.blocks import BlockSlice, CarryLimits, SessionBlocks
from convoy.engine.sessions.format import SessionModel
from convoy.engine.sessions.session import Session
from convoy.errors import (
    Draining,
    NotReady,
    QueueFull,
    RequestError,
    SessionError,
    StageLost,
    StepError,
    Unavailable,
)
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from support.fake_executor import VOCAB, FakeExecutor, next_token
from support.fake_tokenizer import FakeTokenizer
from support.waiting import wait_until

GREEDY = SamplingParams(temperature=0.0)
LIMITS = SchedulerLimits(
    groups=(GroupLimits(16),), block_size=4, max_batch=2, max_step_tokens=24, prefill_chunk=8, max_waiting=4
)
MODEL = SessionModel("fake", "f" * 64, "exact-f32", 2, 1, 1, VOCAB, 60, keeps_kv=True)


def make_engine(executor: FakeExecutor, limits: SchedulerLimits = LIMITS, **more: float) -> Engine:
    options = EngineOptions(max_context=60, probe_s=3600.0, **more)  # type: ignore[arg-type]
    engine = Engine(executor, cast(Tokenizer, FakeTokenizer()), limits, options)
    engine.start()
    return engine


@pytest.fixture(params=[1, 3], ids=["one in flight", "three in flight"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(FakeExecutor(depth=request.param), replace(LIMITS, micro_batches=request.param))
    yield engine
    stats = engine.stats()
    assert stats.free_blocks == stats.num_blocks, "blocks are left behind"
    engine.close()


def expected(tokens: list[int], count: int) -> list[int]:
    known = list(tokens)
    while len(known) < len(tokens) + count:
        known.append(next_token(known))
    return known[len(tokens) :]


def sample_tokens(session: Session, count: int) -> list[int]:
    """Go on by what it says."""
    before = session.position
    for _ in range(count):
        session.eval(session.sample().token_id)
    return list(session.tokens[before:])


def test_only_what_is_new_is_run(engine: Engine) -> None:
    tokens = list(range(20))
    with Session(engine, MODEL) as session:
        assert session.sync(tokens[:9]) == 9
        assert session.sync(tokens[:9]) == 0
        assert session.sync(tokens[:14]) == 5
        session.eval(tokens[14])
        assert session.tokens == tuple(tokens[:15])
        assert session.position == 15
        assert session.sync([*tokens[:10], 40, 41]) == 4, "what is whole before the fork is 8 tokens"
        assert session.sync(tokens[:8]) == 4, "its last token has to be run for its logits"
        assert session.sync([]) == 0
        assert session.position == 0
        assert session.sync(tokens) == 20 - 12


def test_the_whole_pool_is_not_looked_through_after_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(FakeExecutor())
    looks: list[int] = []
    monkeypatch.setattr(engine.scheduler, "check", lambda: looks.append(engine.stats().steps))
    with Session(engine, MODEL) as session:
        session.sync([1, 2, 3])
        sample_tokens(session, 20)
    assert not looks, "each of its tokens left the engine idle"
    engine.close()
    assert len(looks) == 1, "and at the end it is"


def test_what_sessions_run_is_counted_beside_what_requests_do(engine: Engine) -> None:
    with Session(engine, MODEL) as session:
        session.sync(range(9))
        sample_tokens(session, 3)
    generate(engine, GenerationRequest((1, 2), GREEDY, max_tokens=4, ignore_eos=True))
    stats = engine.stats()
    assert (stats.session_tokens, stats.prompt_tokens, stats.generated_tokens) == (12, 2, 4)


def test_it_says_what_a_request_says(engine: Engine) -> None:
    prompt = [3, 1, 4, 1, 5]
    with Session(engine, MODEL) as session:
        session.sync(prompt)
        assert sample_tokens(session, 20) == expected(prompt, 20)
        session.rewind(11)
        assert sample_tokens(session, 14) == expected(prompt, 20)[6:]
        assert session.sample() == session.sample(), "sampling moves nothing"


def test_forks_go_their_own_ways_and_share_what_is_whole(engine: Engine) -> None:
    with Session(engine, MODEL) as one:
        one.sync(range(9))
        free = engine.stats().free_blocks
        with one.fork() as other, other.fork() as third:
            assert engine.stats().free_blocks == free, "a fork costs nothing before its first call"
            assert other.sample() == one.sample()
            other.eval(7)
            assert engine.stats().free_blocks == free - 1, "two of its three blocks are one's"
            third.sync([*range(9), 8, 9])
            one.eval(5)
            for session in (one, other, third):
                assert sample_tokens(session, 3) == expected(list(session.tokens[:-3]), 3)


def test_sessions_share_nothing_unless_they_are_told_to(engine: Engine) -> None:
    with Session(engine, MODEL) as one, Session(engine, MODEL) as other:
        one.sync(range(12))
        assert other.sync(range(12)) == 12
    with Session(engine, MODEL, salt=b"both") as one, Session(engine, MODEL, salt=b"both") as other:
        one.sync(range(12))
        assert other.sync(range(12)) == 4


def test_an_idle_session_gives_way_to_requests_and_goes_on_as_before(engine: Engine) -> None:
    with Session(engine, MODEL) as session:
        session.sync(range(30))
        request = GenerationRequest(tuple(range(40, 60)), GREEDY, max_tokens=30, ignore_eos=True)
        answer = generate(engine, request)
        assert list(answer.token_ids) == expected(list(range(40, 60)), 30)
        assert engine.stats().preempted == 1
        assert sample_tokens(session, 4) == expected(list(range(30)), 4)


def test_many_sessions_hold_more_than_the_batch_and_than_the_blocks(engine: Engine) -> None:
    sessions = [Session(engine, MODEL) for _ in range(6)]
    for turn in range(3):
        for index, session in enumerate(sessions):
            if not turn:
                session.sync([index, *range(15)])
            assert sample_tokens(session, 2) == expected(list(session.tokens[:-2]), 2)
    for session in sessions:
        session.close()


def test_what_makes_no_sense_is_refused_and_changes_nothing(engine: Engine) -> None:
    session = Session(engine, MODEL)
    with pytest.raises(RequestError, match="has no tokens"):
        session.logits()
    session.sync([1, 2, 3])
    for call, error in [
        (lambda: session.eval(VOCAB), f"outside the vocabulary of {VOCAB}"),
        (lambda: session.sync([1, -1]), "outside the vocabulary"),
        (lambda: session.rewind(4), "position 4 is outside the session, which has 3 tokens"),
        (lambda: session.rewind(-1), "outside the session"),
        (lambda: session.sync([1] * 61), "would have 61 tokens, but there is room for 60"),
        (lambda: session.sample(SamplingParams(logit_bias={VOCAB: 1.0})), "logit_bias"),
    ]:
        with pytest.raises(RequestError, match=error):
            cast(Any, call)()
        assert session.tokens == (1, 2, 3)
    assert sample_tokens(session, 2) == expected([1, 2, 3], 2)
    session.close()
    session.close()
    with pytest.raises(RequestError, match="is closed"):
        session.eval(1)


def test_a_wait_that_is_too_long_ends_and_leaves_the_session_as_it_was() -> None:
    executor = Held()
    engine = make_engine(executor)
    session = Session(engine, MODEL, timeout_s=0.05)
    session.sync([1, 2, 3])
    executor.gate.clear()
    with pytest.raises(Unavailable, match=r"not run within 0\.05 s"):
        session.eval(4)
    executor.gate.set()
    assert session.tokens == (1, 2, 3)
    again = Session(engine, MODEL)
    again.sync([9])
    assert sample_tokens(session, 3) == expected([1, 2, 3], 3)
    session.close()
    again.close()
    assert engine.stats().free_blocks == engine.stats().num_blocks
    engine.close()


class Held(FakeExecutor):
    """Hold steps back until ``gate`` opens."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__(depth)
        self.gate = threading.Event()
        self.gate.set()

    def collect(self) -> Any:
        self.gate.wait()
        return super().collect()


def test_a_lost_stage_is_told_and_so_is_an_engine_that_was_closed() -> None:
    engine = make_engine(FakeExecutor(fail_at=3))
    session = Session(engine, MODEL)
    with pytest.raises(StageLost, match="went away"):
        session.sync(range(40))
    assert session.position == 0
    with pytest.raises(StageLost):
        session.sync([1])
    with pytest.raises(StageLost):
        session.save("nowhere", None)
    session.close()
    closed = make_engine(FakeExecutor())
    session = Session(closed, MODEL)
    session.sync([1, 2])
    closed.close(drain_s=30.0)  # an idle session delays no shutdown
    with pytest.raises(StageLost, match="closed"):
        session.eval(3)
    session.close()


def test_closing_the_engine_ends_a_session_that_waits() -> None:
    executor = Held()
    engine = make_engine(executor)
    executor.gate.clear()
    errors: list[BaseException] = []

    def talk() -> None:
        try:
            Session(engine, MODEL).sync([1, 2])
        except Draining as error:
            errors.append(error)

    thread = threading.Thread(target=talk)
    thread.start()
    wait_until(lambda: engine.stats().running or engine.stats().waiting)
    closing = threading.Thread(target=engine.close)
    closing.start()
    thread.join(10)
    executor.gate.set()
    closing.join(10)
    assert len(errors) == 1


def test_a_full_queue_refuses_a_session_like_a_request() -> None:
    executor = Held()
    engine = make_engine(executor, replace(LIMITS, max_waiting=1, max_batch=1))
    first = Session(engine, MODEL)
    first.sync([1])
    executor.gate.clear()
    request = GenerationRequest((1,), GREEDY, max_tokens=2, ignore_eos=True)
    handles = [engine.submit(request, lambda _output: None)]
    wait_until(lambda: engine.stats().running == 1)
    handles.append(engine.submit(request, lambda _output: None))
    with pytest.raises(QueueFull):
        Session(engine, MODEL).sync([1, 2])
    executor.gate.set()
    first.eval(2)
    for handle in handles:
        handle.abort()
    first.close()
    engine.close()


def test_a_saved_session_comes_back_with_its_blocks(engine: Engine, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.7, seed=5)
    with Session(engine, MODEL, params=params) as session:
        session.sync(range(30))
        sample_tokens(session, 3)
        session.choice = 2
        session.save(tmp_path / "chat", None)
        tokens, sampled = session.tokens, session.sample()
    steps: list[tuple[int, int]] = []
    with Session(engine, MODEL) as session:
        assert session.load(tmp_path / "chat", progress=lambda done, total: steps.append((done, total))) == 32
        assert (session.tokens, session.params, session.choice) == (tokens, params, 2)
        assert session.sample() == sampled
        assert session.num_run == 1
        assert steps == sorted(steps)
        assert {total for _, total in steps} == {2 * (tmp_path / "chat").stat().st_size}
        assert steps[-1][0] == steps[-1][1]
        with session.fork() as fork:
            assert fork.sample() == sampled
        with Session(engine, MODEL) as stranger:
            assert stranger.sync(tokens) == 33, "nobody else is told what a file says"


def test_what_a_file_says_is_found_under_no_salt_that_others_know(engine: Engine, tmp_path: Path) -> None:
    with Session(engine, MODEL, salt=b"both") as session, Session(engine, MODEL, salt=b"both") as other:
        session.sync(range(30))
        session.save(tmp_path / "chat", None)
        session.rewind(0)
        other.sync([9] * 50)  # and the blocks of the first are taken
        other.rewind(0)
        assert session.load(tmp_path / "chat") == 28
        assert other.sync(range(30)) == 30


def test_blocks_that_were_given_back_a_moment_ago_are_released_before_they_are_filled() -> None:
    engine = make_engine(FakeExecutor())
    session = Session(engine, MODEL)
    session.sync(range(60))
    sequence = session.sequence
    assert sequence is not None
    kv = np.zeros((2, 2, 4 * 15, 1, 1), dtype=np.float32)

    def give_back_and_fill(executor: Executor, scheduler: Scheduler, lock: threading.Condition) -> None:
        with lock:
            scheduler.finish(sequence)
        piece = BlockSlice(0, 15, [bytes([i]) * 16 for i in range(15)])
        SessionBlocks(engine, MODEL).write_slice(piece, [(0, kv)], executor, scheduler, lock)

    engine.between_steps(give_back_and_fill)
    engine.close()


def test_a_session_of_a_family_that_keeps_no_kv_is_saved_by_its_tokens(
    engine: Engine, tmp_path: Path
) -> None:
    model = replace(MODEL, keeps_kv=False)
    with Session(engine, model) as session:
        session.sync(range(30))
        session.save(tmp_path / "chat", None)
        assert (tmp_path / "chat").stat().st_size < 2000
        assert session.load(tmp_path / "chat") == 0
        assert sample_tokens(session, 3) == expected(list(range(30)), 3)


@pytest.mark.parametrize("other", [{"kernel": "plain-f32"}, {"kv_dtype": "bf16"}])
def test_kv_of_another_kernel_or_dtype_is_not_used(
    engine: Engine, tmp_path: Path, other: dict[str, str]
) -> None:
    with Session(engine, replace(MODEL, **other)) as session:  # type: ignore[arg-type]
        session.sync(range(30))
        session.save(tmp_path / "chat", None)
    with Session(engine, MODEL) as session:
        assert session.load(tmp_path / "chat") == 0
        assert session.tokens == tuple(range(30))
        assert sample_tokens(session, 3) == expected(list(range(30)), 3)


def test_a_load_that_fails_leaves_the_session_as_it_was(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "chat").write_bytes(b"what is this")
    with Session(engine, MODEL) as session:
        session.sync(range(5))
        with pytest.raises(SessionError):
            session.load(tmp_path / "chat")
        assert sample_tokens(session, 3) == expected(list(range(5)), 3)


def test_a_load_whose_kv_is_wrong_leaves_the_session_as_it_was(engine: Engine, tmp_path: Path) -> None:
    """That is found only after the tokens were: its digest is right."""
    with Session(engine, MODEL, params=SamplingParams(temperature=0.5, seed=3)) as session:
        session.sync(range(30))
        session.save(tmp_path / "chat", None)
    body = bytearray((tmp_path / "chat").read_bytes()[:-32])
    body[-4:] = np.float32("nan").tobytes()
    (tmp_path / "chat").write_bytes(body + hashlib.sha256(body).digest())
    with Session(engine, MODEL) as session:
        session.sync(range(5))
        with pytest.raises(SessionError, match="not finite"):
            session.load(tmp_path / "chat")
        assert session.params.greedy
        assert session.tokens == tuple(range(5))
        assert sample_tokens(session, 3) == expected(list(range(5)), 3)


def test_a_session_is_saved_though_its_blocks_are_taken_meanwhile(engine: Engine, tmp_path: Path) -> None:
    with Session(engine, MODEL) as session:
        session.sync(range(40))
        request = GenerationRequest(tuple(range(20)), GREEDY, max_tokens=30, ignore_eos=True)
        generate(engine, request)
        session.save(tmp_path / "chat", None)
        assert session.load(tmp_path / "chat") == 36, "the last of 40 has to be run"
        assert sample_tokens(session, 3) == expected(list(range(40)), 3)


class Counted(FakeExecutor):
    """Count how much is carried at once."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[tuple[int, int]] = []  # bytes, and how many steps were before
        self.on_carry: Callable[[], None] = lambda: None

    def read_blocks(self, start: int, end: int, blocks: SequenceOf[int]) -> Kv:
        return self._note(super().read_blocks(start, end, blocks))

    def write_blocks(self, start: int, blocks: SequenceOf[int], tags: SequenceOf[bytes], kv: Kv) -> None:
        super().write_blocks(start, blocks, tags, self._note(kv))

    def _note(self, kv: Kv) -> Kv:
        self.carried.append((kv.nbytes, len(self.steps)))
        self.on_carry()
        return kv


@pytest.fixture
def counted() -> Iterator[tuple[Counted, Engine]]:
    executor = Counted()
    engine = make_engine(executor)
    yield executor, engine
    assert engine.stats().free_blocks == engine.stats().num_blocks
    engine.close()


def save_and_load(engine: Engine, path: Path, carry: CarryLimits | None = None) -> None:
    with Session(engine, MODEL, carry=carry) as session:
        session.sync(range(50))
        session.save(path, None)
        assert session.load(path) == 48
        assert sample_tokens(session, 3) == expected(list(range(50)), 3)


@pytest.mark.parametrize("held_bytes", [0, 1 << 20], ids=["read twice", "kept"])
@pytest.mark.parametrize("max_bytes", [32, 100, 128])
def test_no_more_is_carried_at_once_than_may_be_however_long_a_layer_or_a_block_is(
    counted: tuple[Counted, Engine],
    tmp_path: Path,
    max_bytes: int,
    held_bytes: int,
) -> None:
    """A block of one layer is 32 bytes here, of both 64, and a layer of the whole session 384."""
    executor, engine = counted
    save_and_load(engine, tmp_path / "at once")
    assert max(executor.carried)[0] > 128
    executor.carried.clear()
    save_and_load(engine, tmp_path / "in parts", CarryLimits(max_bytes, held_bytes))
    assert 0 < max(executor.carried)[0] <= max_bytes
    assert (tmp_path / "in parts").read_bytes() == (tmp_path / "at once").read_bytes()


def test_an_engine_stays_ready_while_it_carries_kv_and_no_longer_when_nothing_moves(
    tmp_path: Path,
) -> None:
    executor = Counted()
    engine = make_engine(executor, ready_s=0.2)
    carry = CarryLimits(max_bytes=32, pass_every_s=0.0)
    with Session(engine, MODEL, carry=carry) as session:
        session.sync(range(50))
        before = engine.stats().steps
        session.save(tmp_path / "chat", None)
        num_passed = engine.stats().steps - before
        assert num_passed > len(executor.carried) // 2, "an empty step passed between most slices"
    hangs, gate = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        gate.wait(60)

    executor.on_carry = hang
    with Session(engine, MODEL, carry=carry) as session:
        session.sync(range(50))
        saving = threading.Thread(target=session.save, args=(tmp_path / "chat", None))
        saving.start()
        assert hangs.wait(60)
        wait_until(lambda: not is_ready(engine))
        gate.set()
        saving.join(60)
    engine.close()


def test_an_empty_step_passes_though_several_always_have_a_slice_to_carry(engine: Engine) -> None:
    before = engine.stats().steps
    carried: list[int] = []

    def carry(*_: object) -> None:
        carried.append(1)
        if engine.stats().steps == before and len(carried) < 100:
            engine.queue_between(carry)

    engine.wake()
    engine.between_steps(carry)
    wait_until(lambda: engine.stats().steps > before or len(carried) == 100)
    assert len(carried) < 100


def is_ready(engine: Engine) -> bool:
    try:
        engine.check_ready()
    except NotReady:
        return False
    return True


def test_a_load_counts_what_is_there_from_the_start_when_others_took_the_room_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(FakeExecutor())
    with Session(engine, MODEL) as session:
        session.sync(range(40))
        session.save(tmp_path / "chat", None)
    blocks = SessionBlocks(engine, MODEL, limits=CarryLimits(max_bytes=64))  # a block at a time
    write, wrote = blocks.write_slice, []

    def crowded(
        one: Any, layers: Any, executor: Executor, scheduler: Scheduler, lock: threading.Condition
    ) -> bool:
        pool = scheduler.pools.first
        taken = pool.allocate(pool.num_free) if one.start == 4 else []
        wrote.append(write(one, layers, executor, scheduler, lock))
        pool.free(taken)
        return wrote[-1]

    monkeypatch.setattr(blocks, "write_slice", crowded)
    found = blocks.load(
        tmp_path / "chat", None, salt=b"s" * 32, adopt=lambda found: None, progress=lambda done, total: None
    )
    assert wrote.count(False) == 1
    assert found == 16, "what is behind the block that is missing is of no use"
    engine.close()


def test_a_full_pool_takes_what_fits_of_a_saved_session(engine: Engine, tmp_path: Path) -> None:
    with Session(engine, MODEL) as session:
        session.sync(range(44))
        session.save(tmp_path / "chat", None)
    with Session(engine, MODEL) as other, Session(engine, MODEL) as session:
        other.sync(range(40))
        assert session.load(tmp_path / "chat") == 24
        assert sample_tokens(session, 3) == expected(list(range(44)), 3)
        assert sample_tokens(other, 3) == expected(list(range(40)), 3)


@pytest.mark.parametrize("seed", range(12))
def test_any_way_through_sessions_and_requests_says_what_the_tokens_say(seed: int, tmp_path: Path) -> None:
    """Moves at random over few blocks, each looked at; the engine checks its blocks whenever idle."""
    random = Random(seed)
    depth = random.choice([1, 3])
    limits = replace(LIMITS, groups=(GroupLimits(random.choice([16, 24])),), micro_batches=depth)
    engine = make_engine(FakeExecutor(depth=depth), limits)
    sessions = [Session(engine, MODEL, salt=random.choice([None, b"same"])) for _ in range(3)]
    for move in range(40):
        session = random.choice(sessions)
        match random.randrange(7):
            case 0:
                session.sync([random.randrange(3) for _ in range(random.randrange(50))])
            case 1:
                session.sync([*session.tokens[:40], *range(random.randrange(1, 9))])
            case 2:
                session.rewind(random.randrange(session.position + 1))
            case 3:
                sessions.append(session.fork())
                sessions.pop(0).close()
            case 4 if session.position:
                session.save(tmp_path / "chat", random.choice([None, bytes(32)]))
            case 5 if (tmp_path / "chat").exists():
                with suppress(SessionError):  # with a key or without, as it was saved or not
                    session.load(tmp_path / "chat", random.choice([None, bytes(32)]))
            case _:
                request = GenerationRequest((move, seed), GREEDY, max_tokens=9, ignore_eos=True)
                assert list(generate(engine, request).token_ids) == expected([move, seed], 9)
        if session.position and session in sessions:
            assert session.sample().token_id == next_token(list(session.tokens))
    for session in sessions:
        session.close()
    wait_until(lambda: engine.stats().free_blocks == engine.stats().num_blocks)
    engine.close()


@pytest.mark.parametrize("depth", [1, 3], ids=["one in flight", "three in flight"])
def test_work_between_steps_runs_while_none_is_in_flight_and_requests_go_on(depth: int) -> None:
    executor = FakeExecutor(depth=depth)
    engine = make_engine(executor, replace(LIMITS, micro_batches=depth))
    seen: list[int] = []
    over = threading.Event()

    def look(*_: object) -> None:
        seen.append(len(executor.results))

    def ask() -> None:
        request = GenerationRequest((1, 2), GREEDY, max_tokens=20, ignore_eos=True)
        try:
            # Requests go on until enough looks came between their steps, in whatever order the threads run.
            while len(seen) < 20:
                assert list(generate(engine, request).token_ids) == expected([1, 2], 20)
        finally:
            # Otherwise a failed request would leave the loop below without an end.
            over.set()

    thread = threading.Thread(target=ask)
    thread.start()
    while not over.is_set():
        engine.between_steps(look)
    thread.join()
    assert not any(seen)


def test_an_error_between_steps_is_its_own_and_a_lost_stage_is_everybodys() -> None:
    engine = make_engine(FakeExecutor())

    def refuse(*_: object) -> None:
        raise StepError("refused")

    def lose(*_: object) -> None:
        raise StageLost("lost")

    with pytest.raises(StepError):
        engine.between_steps(refuse)
    with Session(engine, MODEL) as session:
        assert session.sync([1, 2]) == 2
    with pytest.raises(StageLost):
        engine.between_steps(lose)
    with pytest.raises(StageLost):
        engine.between_steps(refuse)
    engine.close()


class HeldExecutor(FakeExecutor):
    """Hold steps back from `hold` on, until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.goes = threading.Event()
        self.goes.set()
        self.held = threading.Event()

    def collect(self) -> StepResult:
        if not self.goes.is_set():
            self.held.set()
            assert self.goes.wait(20.0)
        return super().collect()


def test_a_session_that_cannot_be_carried_in_time_says_so_and_stays_what_it_was(tmp_path: Path) -> None:
    executor = HeldExecutor()
    engine = make_engine(executor)
    path = tmp_path / "chat"
    with Session(engine, MODEL, timeout_s=0.05) as session:
        session.sync(range(9))
        session.save(path, None)
        saved = path.read_bytes()
        session.eval(3)
        executor.goes.clear()
        asked = GenerationRequest((1, 2), GREEDY, max_tokens=4, ignore_eos=True)
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        engine.submit(asked, outputs.put)
        assert executor.held.wait(20.0)
        for call in (partial(session.save, key=None), session.load):
            with pytest.raises(Unavailable, match=r"no step ended within 0\.05 s"):
                call(path)
        assert session.tokens == (*range(9), 3)
        assert path.read_bytes() == saved
        assert not engine.has_paused_work, "what nobody waits for is not done"
        executor.goes.set()
        session.save(path, None)
        assert path.read_bytes() != saved
    engine.close()


def test_what_was_begun_between_steps_cannot_be_taken_back() -> None:
    between, lock = PausedWork(), threading.Condition()
    taken: list[bool] = []
    begun = between.add(lambda *_: taken.append(between.drop(begun)))
    waits = between.add(lambda *_: taken.append(True))
    between.do_one(cast(Executor, None), cast(Scheduler, None), lock)
    assert taken == [False]
    assert between.drop(waits)
    assert not between
