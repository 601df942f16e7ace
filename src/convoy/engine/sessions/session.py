"""A session: one timeline of tokens that its owner extends, rewinds and forks, with K/V kept on every stage.

Chats, searches and agents are built on it. It works alike over one process and over any split. Between two
calls it holds its blocks until another sequence needs them. If they were taken, or a stage was lost, the next
call runs its tokens again, and in exact mode nothing else differs.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Self

from convoy.engine.engine import Engine
from convoy.engine.outputs import FinishReason
from convoy.engine.sequence import RowResult, Sequence
from convoy.engine.sessions.blocks import CarryLimits, SessionBlocks
from convoy.engine.sessions.format import Progress, SavedState, SessionModel
from convoy.errors import ConvoyError, Draining, RequestError, Unavailable
from convoy.model.sampling.output_rows import Logits, SampleJob, SampleResult
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import Sampled, sample
from convoy.wire.messages.control import Row

_LOGITS = SampleJob(SamplingParams(temperature=0.0), choice=0, position=0, wants_logits=True)


class SessionRun:
    """Own a session's sequence in the engine, from one start of it to its end."""

    def __init__(self, tokens: SequenceOf[int], salt: bytes) -> None:
        self.sequence = Sequence(tuple(tokens), max_tokens=0, salt=salt)
        self.logits: Logits | None = None
        self.error: ConvoyError | None = None
        self.num_run = 0
        self.done = threading.Event()

    @property
    def group(self) -> object:
        return self

    def sample_jobs(self, row: Row, drafts: SequenceOf[int]) -> list[SampleJob]:  # noqa: ARG002 - nobody guesses here
        return [_LOGITS] * row.num_outputs

    def advance(self, row: Row, drafts: SequenceOf[int], outcomes: SequenceOf[SampleResult]) -> RowResult:  # noqa: ARG002
        self.num_run += row.num_tokens
        if not outcomes or row.start + row.num_tokens < len(self.sequence.tokens):
            return RowResult()
        if outcomes[-1].error is not None:
            raise outcomes[-1].error
        self.logits = outcomes[-1].logits
        self.done.set()
        return RowResult(rests=True)

    def finish(self, reason: FinishReason) -> None:
        self.fail(Draining(f"the session was ended: {reason}"))

    def fail(self, error: ConvoyError | None) -> None:
        self.error = error
        self.done.set()


class Session:
    """Hold one timeline of tokens; `RunningCluster.session` makes it. Calls block, and come from one thread
    at a time.

    Calls raise RequestError for invalid arguments, StageLost if a stage was lost and not replaced, QueueFull,
    Draining, and Unavailable after ``timeout_s`` (`save` and `load`: for each of their slices). After an
    error, tokens and position are unchanged.

    ``salt``: sessions and requests share the K/V of a common prefix only if their salts are equal. The
    default is random; the session's forks have the same. ``choice`` separates the samples of one seed, as the
    choices of a request do.
    """

    def __init__(
        self,
        engine: Engine,
        model: SessionModel,
        *,
        params: SamplingParams | None = None,
        salt: bytes | None = None,
        timeout_s: float | None = None,
        carry: CarryLimits | None = None,
    ) -> None:
        self._carry = carry or CarryLimits()
        self.model = model
        self.params = params or SamplingParams(temperature=0.0)
        self.choice = 0
        self._engine = engine
        self._timeout_s = timeout_s
        self._salt = secrets.token_bytes(32) if salt is None else salt
        self._tokens: list[int] = []
        # The tokens that penalties count as the prompt.
        self._num_prompt = 0
        self._run: SessionRun | None = None
        self._logits: Logits | None = None
        self._closed = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return all tokens so far."""
        return tuple(self._tokens)

    @property
    def num_run(self) -> int:
        """Return how many tokens of the sequence ran; the stages found the others in their pools."""
        return 0 if self._run is None else self._run.num_run

    @property
    def sequence(self) -> Sequence | None:
        """Return the sequence that holds the session's K/V now, if any."""
        return None if self._run is None else self._run.sequence

    @property
    def position(self) -> int:
        """Return the number of tokens, which is the place of the next one."""
        return len(self._tokens)

    def sync(self, tokens: Iterable[int]) -> int:
        """Make ``tokens`` the session's tokens, running only those after the common prefix.

        Return how many were run. They count as the prompt for penalties.
        """
        wanted = self._check(tokens)
        common = _common(self._tokens, wanted)
        # The session's tokens are a prefix of the wanted ones, so it continues where it stands.
        if common == len(self._tokens) and (common < len(wanted) or self._logits is not None or not wanted):
            num_run = self._extend(wanted[common:])
        else:
            num_run = self._replace(wanted)
        self._num_prompt = len(wanted)
        return num_run

    def eval(self, token: int) -> None:
        """Run one more token; it counts as generated for penalties."""
        self._extend(self._check([token]))

    def logits(self) -> Logits:
        """Return the logits of the next token, float32 [vocabulary].

        After `rewind`, a few tokens run again.
        """
        return self._head().copy()

    def sample(self, params: SamplingParams | None = None) -> Sampled:
        """Sample the token at `position` from the logits there; the session does not move.

        The random number depends on (seed, choice, position) alone, so the same call gives the same token.
        """
        params = params or self.params
        params.check_vocabulary(self.model.vocab_size)
        logits, looks_back = self._head(), params.reshapes
        return sample(
            logits,
            params,
            choice=self.choice,
            position=len(self._tokens),
            prompt_ids=self._tokens[: self._num_prompt] if looks_back else (),
            generated_ids=self._tokens[self._num_prompt :] if looks_back else (),
        )

    def rewind(self, position: int) -> None:
        """Forget the tokens from ``position`` on. The whole blocks before it need not run again."""
        self._check_open()
        if not 0 <= position <= len(self._tokens):
            raise RequestError(
                f"position {position} is outside the session, which has {len(self._tokens)} tokens",
                param="position",
            )
        if position < len(self._tokens):
            self._let_go()
            del self._tokens[position:]
            self._num_prompt = min(self._num_prompt, position)

    def fork(self, *, choice: int | None = None) -> Session:
        """Return another session with the same tokens; it shares the K/V of whole blocks from its first call
        on.
        """
        self._check_open()
        fork = Session(
            self._engine, self.model, params=self.params, salt=self._salt, timeout_s=self._timeout_s
        )
        fork._tokens, fork._num_prompt = list(self._tokens), self._num_prompt
        fork._logits = self._logits
        fork.choice = self.choice if choice is None else choice
        return fork

    def save(self, path: str | Path, key: bytes | None, progress: Progress | None = None) -> None:
        """Write tokens, sampling state and K/V to a file (0600).

        It replaces an existing file; after an error, the old file is still there. ``key``, of 32 bytes, seals
        it. With None the file is plain: any reader of the file reads the prompt. Raises SessionError too.
        """
        self._check_open()
        state = SavedState(self.tokens, self._num_prompt, self.choice, self.params, 0)
        blocks = SessionBlocks(self._engine, self.model, self._timeout_s, limits=self._carry)
        blocks.save(Path(path), key, state, resident=self._resident, progress=progress or _unseen)

    def load(self, path: str | Path, key: bytes | None = None, progress: Progress | None = None) -> int:
        """Become the saved session, under any split. Return for how many tokens the saved K/V is used.

        The other tokens run with the next call. The session then has a new salt, so that no other session
        shares K/V that came from a file. Raises SessionError for a file that is damaged, or of another model.
        """
        self._check_open()
        blocks = SessionBlocks(self._engine, self.model, self._timeout_s, limits=self._carry)
        salt = secrets.token_bytes(32)
        before = (self._salt, self._tokens, self._num_prompt, self.choice, self.params)

        def adopt(state: SavedState) -> None:
            self._let_go()
            self._salt, self._tokens, self._num_prompt = salt, list(state.tokens), state.num_prompt
            self.choice, self.params = state.choice, state.params

        try:
            return blocks.load(Path(path), key, salt=salt, adopt=adopt, progress=progress or _unseen)
        except BaseException:
            self._salt, self._tokens, self._num_prompt, self.choice, self.params = before
            raise

    def close(self) -> None:
        """Give its blocks back. A second call does nothing."""
        self._let_go()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How it gets run.

    def _head(self) -> Logits:
        self._check_open()
        if not self._tokens:
            raise RequestError("the session has no tokens, so there is no next token", param="tokens")
        if self._logits is None:
            self._replace(self._tokens)
        assert self._logits is not None
        return self._logits

    def _extend(self, new: list[int]) -> int:
        """Run ``new`` after the tokens; return how many tokens ran."""
        if not new:
            return 0
        run, before = self._run, 0 if self._run is None else self._run.num_run
        if run is None or not self._resume(run, new):
            return self._replace([*self._tokens, *new])
        self._await(run)
        self._tokens.extend(new)
        return run.num_run - before

    def _replace(self, tokens: list[int]) -> int:
        """Run ``tokens`` as a new sequence, after the prefix that stages still hold; return how many ran."""
        self._let_go()
        if not tokens:
            self._tokens = []
            return 0
        run = SessionRun(tokens, self._salt)
        self._resume(run, ())
        self._await(run)
        self._tokens = tokens
        return run.num_run

    def _resume(self, run: SessionRun, new: SequenceOf[int]) -> bool:
        run.done.clear()
        if not self._engine.resume(run, new):
            return False
        self._run, self._logits = run, None
        return True

    def _await(self, run: SessionRun) -> None:
        try:
            if not run.done.wait(self._timeout_s):
                raise Unavailable(f"the session's tokens were not run within {self._timeout_s:g} s")
            if run.error is not None:
                raise run.error
        except BaseException:
            self._let_go()
            raise
        self._logits = run.logits

    def _let_go(self) -> None:
        run, self._run, self._logits = self._run, None, None
        if run is not None:
            self._engine.release(run)

    def _resident(self) -> Sequence:
        """Return the sequence that holds the K/V of all tokens; run it once more if its blocks were taken."""
        if self._run is None or not self._run.sequence.tables or self._logits is None:
            self._replace(self._tokens)
        assert self._run is not None
        return self._run.sequence

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the session is closed")

    def _check(self, tokens: Iterable[int]) -> list[int]:
        self._check_open()
        wanted = [int(token) for token in tokens]
        if wanted and not 0 <= min(wanted) <= max(wanted) < self.model.vocab_size:
            raise RequestError(
                f"a token is outside the vocabulary of {self.model.vocab_size}", param="tokens"
            )
        return wanted


def _unseen(_done: int, _total: int) -> None:
    pass


def _common(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
