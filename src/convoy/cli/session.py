"""``convoy session``: answer a prompt, save the conversation, and continue it later with any split."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.flags.device import computing
from convoy.cli.flags.quantize import ComputeFlag, QuantizeFlag, kernel_for
from convoy.cli.flags.steps import KvDtypeFlag, check_choice
from convoy.cli.local.members import LayersFlag
from convoy.cli.operator.home import config_file
from convoy.cli.operator.session_key import KeyFile
from convoy.cli.serve import start_cluster
from convoy.cli.show.output import JsonFlag, counted, format_bytes, print_json, print_note
from convoy.config.kernels import host_kernels_text
from convoy.config.settings import load_config, override
from convoy.errors import ConvoyError, RequestError, SessionError, UsageError
from convoy.sdk.local_cluster import LocalCluster, LocalOptions

if TYPE_CHECKING:
    from convoy.cluster.running import RunningCluster
    from convoy.engine.sessions.session import Session
    from convoy.model.checkpoints.source import ModelSource
    from convoy.model.sampling.params import SamplingParams
    from convoy.model.text.tokens import Tokenizer


LoadFlag = Annotated[Path | None, typer.Option(help="Continue this saved session.")]
SaveFlag = Annotated[
    Path | None, typer.Option(help="Save the session to this file. The file holds the prompt.")
]
KeyFlag = Annotated[
    Path | None,
    typer.Option(
        help="Key file that seals the saved session; made if missing.  [default: session.key beside the "
        "identity]"
    ),
]
PlainFlag = Annotated[bool, typer.Option("--plain", help="Save without a seal, or load a file without one.")]


def session(
    model: Annotated[str, typer.Argument(help="demo, demo-mini or a Hugging Face directory.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt. Without it: only load and save.")] = None,
    load: LoadFlag = None,
    save: SaveFlag = None,
    key: KeyFlag = None,
    plain: PlainFlag = False,
    members: Annotated[
        int | None, typer.Option(help="Processes on this machine; the first is the head.  [default: 1]")
    ] = None,
    layers: LayersFlag = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="This head's convoy.toml, in place of local members.  [default: .convoy/convoy.toml, but "
            "for --members]"
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of the answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.  [default: 0, or as saved]")] = None,
    seed: Annotated[int | None, typer.Option(help="The random seed.  [default: 0, or as saved]")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use no chat template.")] = False,
    kernel: Annotated[str, typer.Option(help=f"{host_kernels_text()}.")] = "auto",
    quantize: QuantizeFlag = None,
    compute: ComputeFlag = None,
    kv_dtype: KvDtypeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer a prompt, and keep the conversation in a file."""
    turn = SessionTurn(
        *(prompt, load, save, max_tokens, temperature, seed, raw),
        quiet=as_json,
        quantize=quantize,
        compute=compute,
        kv_dtype=kv_dtype,
    )
    turn.check()
    found = config_file(None) if config is None and members is None and layers is None else None
    keys = SessionKeys.of(turn, KeyFile.of(key, config or found, plain=plain))
    if found is not None and not as_json:
        print_note(f"as the head of {found}; --members 1 is this machine alone")
    check_choice("engine", "kv_dtype", kv_dtype)
    engine = {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    options = LocalOptions(
        members or 1, layers, kernel_for(quantize, kernel, compute, kernel_from="--kernel"), engine=engine
    )
    _start(turn, keys, model, config or found, options)


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """Hold the flags of one run of a session."""

    prompt: str | None
    load: Path | None
    save: Path | None
    max_tokens: int
    temperature: float | None
    seed: int | None
    raw: bool
    quiet: bool
    quantize: str | None = None
    compute: str | None = None
    kv_dtype: str | None = None

    def check(self) -> None:
        """Raise UsageError for flags that do not fit together."""
        if self.max_tokens < 1:
            raise UsageError(f"--max-tokens is {self.max_tokens}, expected 1 or more")
        if self.prompt is None and self.load is None:
            raise UsageError("there is nothing to do", hint="give --prompt, --load or both")

    def check_files(self, key: bytes | None) -> None:
        """Raise SessionError for the session's files, before anything is started."""
        from convoy.engine.sessions.file import SessionReader

        if self.load is not None:
            with SessionReader(self.load, key):
                pass
        if self.save is not None and self.save.exists() and not _same(self.save, self.load):
            raise SessionError(
                f"{self.save} exists already, and saving would replace it",
                hint=f"--load {self.save} continues it; or name another file",
            )
        if self.save is not None and not self.save.parent.is_dir():
            raise SessionError(
                f"cannot write {self.save}: there is no directory {self.save.parent}",
                hint=f"mkdir -p {self.save.parent}",
            )

    def check_model(self, source: ModelSource) -> None:
        """Raise RequestError for a model without a chat template, before anything is started."""
        from convoy.model.text.tokens import Tokenizer

        if self.prompt is not None and not self.raw and not Tokenizer(source).has_chat_template:
            raise RequestError(
                f"{source.name} has no chat template",
                param="prompt",
                hint="--raw puts the prompt behind the text as it is",
            )

    def params(self, saved: SamplingParams) -> SamplingParams:
        """Return the saved parameters with the values of flags in their place. Raises RequestError."""
        if self.temperature is not None:
            saved = replace(saved, temperature=self.temperature)
        return saved if self.seed is None else replace(saved, seed=self.seed)

    def tokens(self, tokenizer: Tokenizer, so_far: tuple[int, ...]) -> list[int]:
        """Return the session's tokens followed by those of the prompt."""
        if self.prompt is None:
            return list(so_far)
        if self.raw:
            return [*so_far, *tokenizer.encode(self.prompt)]
        return [
            *so_far,
            *(next_turn(tokenizer, self.prompt) if so_far else first_turn(tokenizer, self.prompt)),
        ]


def _same(one: Path, other: Path | None) -> bool:
    return other is not None and other.exists() and one.samefile(other)


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """Hold the keys of the file to load and of the file to save. A key is None for a file without a seal."""

    load: bytes | None
    save: bytes | None

    @classmethod
    def of(cls, turn: SessionTurn, file: KeyFile) -> SessionKeys:
        """Check the files of ``turn``, and only then make a key. Raises `SessionError`."""
        load = None if turn.load is None else file.to_load(turn.load)
        turn.check_files(load)
        return cls(load, None if turn.save is None else file.to_save())


def first_turn(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of a conversation that begins with ``prompt``."""
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def next_turn(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens that the template puts between an answer and the next one, for ``prompt``.

    They are the common end of two conversations that differ in the first answer alone.
    """

    def after(answer: str) -> list[int]:
        said = [("user", "x"), ("assistant", answer), ("user", prompt)]
        return tokenizer.encode_chat([{"role": role, "content": text} for role, text in said])

    one, other = after("1"), after("2")
    common = 0
    while common < min(len(one), len(other)) and one[-1 - common] == other[-1 - common]:
        common += 1
    return one[len(one) - common :]


def _start(
    turn: SessionTurn, keys: SessionKeys, model: str, config: Path | None, options: LocalOptions
) -> None:
    """Run the turn on the cluster of ``config``, or on one of processes on this machine."""
    from convoy.model.checkpoints.source import ModelSource

    source = ModelSource.resolve(model)
    turn.check_model(source)
    if config is not None:
        settings = computing(load_config(config), turn.quantize, turn.compute, None)
        settings = override(settings, engine=override(settings.engine, kv_dtype=turn.kv_dtype))
        _run(turn, keys, start_cluster(settings, model, quiet=turn.quiet))
        return
    options.check(source.spec)
    with LocalCluster(options) as local:
        local.start_peers(model)
        settings = local.config(local.head)
        try:
            _run(turn, keys, start_cluster(settings, model, quiet=turn.quiet, watch=local.check_alive))
        except ConvoyError as error:
            local.reraise(error)


def _run(turn: SessionTurn, keys: SessionKeys, cluster: RunningCluster) -> None:
    try:
        with cluster.session() as talk:
            facts = _talk(turn, keys, cluster, talk)
            if turn.quiet:
                status = cluster.status()
                print_json({"model": status.model, **facts, "route": status.route})
    finally:
        cluster.close()


def _talk(turn: SessionTurn, keys: SessionKeys, cluster: RunningCluster, talk: Session) -> dict[str, object]:
    tell = (lambda _text: None) if turn.quiet else print_note
    found = 0
    if turn.load is not None:
        found = talk.load(turn.load, keys.load)
        tell(f"loaded {counted(talk.position, 'token')} from {turn.load}, {found} of them with their K/V")
    talk.params = turn.params(talk.params)
    began_s = time.monotonic()
    loaded = talk.position
    num_run = talk.sync(turn.tokens(cluster.tokenizer, talk.tokens))
    first_s = time.monotonic() - began_s
    text, reason = ("", "none") if turn.prompt is None else answer_turn(turn, cluster.tokenizer, talk)
    if reason == "length":
        tell(f"the answer was cut off after {counted(turn.max_tokens, 'token')}: --max-tokens allows more")
    if turn.save is not None:
        talk.save(turn.save, keys.save)
        sealed = "sealed" if keys.save is not None else "not sealed: anyone with the file can read it"
        size = format_bytes(turn.save.stat().st_size)
        tell(f"saved {counted(talk.position, 'token')} to {turn.save}, {size}, {sealed}")
    return {
        "text": text,
        "finish_reason": reason,
        "token_ids": talk.tokens,
        "loaded_tokens": loaded,
        "found_tokens": found,
        "run_tokens": num_run,
        "time_to_first_token_s": first_s,
        "saved": turn.save,
    }


def answer_turn(turn: SessionTurn, tokenizer: Tokenizer, talk: Session) -> tuple[str, str]:
    from convoy.model.text.stop import TextStream

    stream = TextStream(tokenizer)
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if not turn.quiet:
            print(piece, end="", flush=True)

    reason = "length"
    # A full context ends the answer but not the conversation, which can still be saved.
    for _ in range(min(turn.max_tokens, talk.model.max_context - talk.position)):
        token = talk.sample().token_id
        if token in tokenizer.eos_ids:
            reason = "stop"
            break
        show(stream.push(token))
        talk.eval(token)
    show(stream.finish())
    if not turn.quiet:
        print()
    return "".join(pieces), reason
