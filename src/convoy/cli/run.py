"""``convoy run``: run a whole cluster on this machine, to serve or to answer one prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli.flags.device import DeviceFlag
from convoy.cli.flags.quantize import ComputeFlag, QuantizeFlag, kernel_for
from convoy.cli.flags.steps import check_choice, with_step_flags
from convoy.cli.local.members import LayersFlag
from convoy.cli.local.pin import PinFlag, pinned, share_cores
from convoy.cli.running.hub import local_model
from convoy.cli.serve import Shown, check_port, serve_cluster, start_cluster
from convoy.cli.show.output import JsonFlag, VerboseFlag, counted, print_json, print_note
from convoy.config.kernels import host_kernels_text
from convoy.config.settings import Config, override
from convoy.config.table import ServeConfig
from convoy.errors import ConvoyError, UsageError
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.names import local_names
from convoy.sdk.options import serve_options

if TYPE_CHECKING:
    from convoy.api.listen.options import ServeOptions
    from convoy.cluster.running import RunningCluster
    from convoy.engine.completion import Completion
    from convoy.engine.requests.request import GenerationRequest
    from convoy.model.checkpoints.source import ModelSource

ModelArgument = Annotated[
    str, typer.Argument(help="demo, demo-mini, a directory, org/name[:QUANT] on the hub or synthetic:NAME.")
]


@with_step_flags
def run(
    *,
    model: ModelArgument,
    members: Annotated[int, typer.Option(help="Processes on this machine; the first is the head.")] = 2,
    layers: LayersFlag = None,
    prompt: Annotated[
        str | None, typer.Option(help="Answer this prompt and exit, instead of serving.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="With --prompt: the most tokens of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="With --prompt: 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="With --prompt and a temperature: the random seed.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="With --prompt: use no chat template.")] = False,
    kernel: Annotated[str, typer.Option(help=f"{host_kernels_text()}.")] = "auto",
    quantize: QuantizeFlag = None,
    compute: ComputeFlag = None,
    device: DeviceFlag = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of each member.")] = None,
    pin: PinFlag = False,
    engine: dict[str, Any],
    sharing: dict[str, Any],
    listens: dict[str, Any],
    verbose: VerboseFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Split a model over processes here, to serve it or answer."""
    from convoy.model.checkpoints.source import ModelSource

    if max_tokens < 1:
        raise UsageError(f"--max-tokens is {max_tokens}, expected 1 or more")
    http = ServeConfig(**listens)
    served = _check_early(members, kernel, http, serves=prompt is None)
    model = local_model(Config(), model, quiet=as_json)
    source = ModelSource.resolve(model)
    options = LocalOptions(
        members, layers, kernel_for(quantize, kernel, compute, kernel_from="--kernel"), threads, engine=engine
    )
    cores = share_cores(members) if pin else None
    options = replace(options, device=device or "auto", cores=cores, sharing=sharing, note=print_note)
    asked: GenerationRequest | ServeOptions
    if served is not None:
        asked = served
    else:
        asked = PromptRun(prompt or "", raw, max_tokens, temperature, seed).request(source)
    # Errors in the options come before any process starts.
    options.check(source.spec)
    with LocalCluster(options) as local, pinned(options.head_cores):
        local.start_peers(model)
        settings = override(local.config(local.head), serve=http)
        show = Shown(as_json, verbose, verb="run", on_ready=partial(local.tell_ends, print_note))
        _serve_or_answer(local, settings, model, asked, show)


def _check_early(num_members: int, kernel: str, http: ServeConfig, *, serves: bool) -> ServeOptions | None:
    """Return the options of the server, or None if it does not serve.

    Raises the errors of flags before a download, and before PyTorch is loaded.
    """
    local_names(num_members)
    check_choice("model", "kernel", kernel)
    if not serves and (http.also or http.keep_alive is not None):
        raise UsageError(
            "--prompt came with --also or --keep-alive, and answers once with one model",
            hint="leave --prompt out to serve, or the others to answer",
        )
    if not serves:
        return None
    options = serve_options(Config(serve=http))
    options.check()
    check_port(options)
    return options


def _serve_or_answer(
    local: LocalCluster,
    settings: Config,
    model: str,
    asked: GenerationRequest | ServeOptions,
    show: Shown,
) -> None:
    from convoy.api.listen.options import ServeOptions

    try:
        if isinstance(asked, ServeOptions):
            serve_cluster(settings, model, show, watch=local.check_alive, options=asked)
        else:
            _answer(local, settings, model, asked, show)
    except ConvoyError as error:
        local.reraise(error)


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Hold the flags of the one prompt."""

    prompt: str
    raw: bool
    max_tokens: int
    temperature: float
    seed: int

    def request(self, source: ModelSource) -> GenerationRequest:
        """Return the request to the engine. Raises `RequestError` for a prompt or parameters that are
        invalid.
        """
        from convoy.engine.requests.request import GenerationRequest
        from convoy.model.sampling.params import SamplingParams
        from convoy.model.text.tokens import Tokenizer

        tokenizer = Tokenizer(source)
        params = SamplingParams(temperature=self.temperature, seed=self.seed)
        message = {"role": "user", "content": self.prompt}
        ids = tokenizer.encode(self.prompt) if self.raw else tokenizer.encode_chat([message])
        return GenerationRequest(tuple(ids), params, max_tokens=self.max_tokens)


def _answer(
    local: LocalCluster, settings: Config, model: str, request: GenerationRequest, show: Shown
) -> None:
    from convoy.engine.completion import generate

    def print_piece(text: str) -> None:
        print(text, end="", flush=True)

    cluster = start_cluster(
        settings, model, quiet=show.as_json, verbose=show.verbose, watch=local.check_alive
    )
    try:
        answer = generate(cluster.engine, request, None if show.as_json else print_piece)
        if show.as_json:
            print_json(_facts(cluster, answer))
            return
    finally:
        cluster.close()
    print()
    print_note(_summary(answer))


def _summary(answer: Completion) -> str:
    """Return the number of tokens and the time to the first, with a rate if there is more than one token."""
    num_tokens = len(answer.token_ids)
    summary = f"{counted(num_tokens, 'token')}, first after {answer.time_to_first_token_s * 1000:.0f} ms"
    return f"{summary}, then {answer.decode_tokens_per_s:.1f} tokens/s" if num_tokens > 1 else summary


def _facts(cluster: RunningCluster, answer: Completion) -> dict[str, object]:
    status = cluster.status()
    return {
        "model": status.model,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
        "time_to_first_token_s": answer.time_to_first_token_s,
        "decode_tokens_per_s": answer.decode_tokens_per_s,
        "kernel": status.kernel,
        "route": status.route,
        "stages": status.stages,
        "sealed_bytes": cluster.head.sealed_bytes(),
    }
