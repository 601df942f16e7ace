"""``convoy demo``: run a split model on one machine, and check that the split changes no token.

1. Make two identities and a signed roster. Start a head and a peer, each a process of its own.
2. Ask questions over HTTP, and stream the answers.
3. Ask one process that holds the whole model. Every token and log-probability must be equal.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli.show.cluster_status import print_cluster, print_stages
from convoy.cli.show.output import JsonFlag, VerboseFlag, format_bytes, print_json, print_note
from convoy.config.type_resolution import resolved
from convoy.errors import ConvoyError, PeerUnreachable
from convoy.sdk.endpoint import Endpoint
from convoy.sdk.local_cluster import LocalCluster, LocalOptions

if TYPE_CHECKING:
    from convoy.cluster.status import ClusterStatus

MODEL = "demo"
QUESTIONS = ("What is 58+59? Answer with just the number.", "Tell me a short story about a fox.")
_MAX_TOKENS = 160
# A first start in a clone compiles for minutes on a slow machine. A process that ends is noticed at once.
_START_WAIT_S = 600.0
_SAY_EVERY_S = 5.0
_SERVED = re.compile(r"^serving \S+ at (\S+)/v1$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DemoReply:
    """Hold one answer. Each token is (bytes, log-probability), both exact."""

    text: str
    tokens: tuple[tuple[tuple[int, ...], float], ...]
    seconds: float
    first_s: float

    @property
    def tokens_per_s(self) -> float:
        after = self.seconds - self.first_s
        return (len(self.tokens) - 1) / after if len(self.tokens) > 1 and after > 0 else 0.0


def demo(
    members: Annotated[int, typer.Option(help="Processes; the first is the head.")] = 2,
    verbose: VerboseFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Split the bundled model over two sealed processes and ask it."""
    say = _quiet if as_json else print_note
    many = "1 member" if members == 1 else f"{members} members"
    say(f"starting {many} of a cluster, each a process with its own identity ...")
    options = LocalOptions(num_members=members)
    answers, status = _ask_cluster(options, say, show=not as_json, verbose=verbose)
    # The reference: the same questions, on the same number of threads, without a split.
    say("asking the same of one process that holds the whole model ...")
    alone, _ = _ask_cluster(LocalOptions(num_members=1, num_threads=options.threads), say, show=False)
    equal = [a.tokens for a in answers] == [a.tokens for a in alone]
    if as_json:
        print_json(_facts(status, answers, equal=equal))
    else:
        _print_summary(status, answers, equal=equal)
    if not equal:
        raise ConvoyError(
            f"the split model's tokens differ from one process's, kernel {status.kernel}",
            hint="exact-f32 promises equality, plain-f32 only nearness; report this if it was exact-f32",
        )


def _quiet(_text: str) -> None:
    pass


def _ask_cluster(
    options: LocalOptions, say: Callable[[str], None], *, show: bool, verbose: bool = False
) -> tuple[list[DemoReply], ClusterStatus]:
    import msgspec

    from convoy.cluster.status import ClusterStatus

    with LocalCluster(options) as local:
        local.start_peers(MODEL)
        local.start(local.head, "serve", MODEL, "--config", str(local.config_file(local.head)))
        try:
            endpoint = _wait_until_served(local, say)
            status = msgspec.convert(endpoint.get("/status"), resolved(ClusterStatus))
            if show:
                print_cluster(status) if verbose else print_stages(status)
                print()
            answers = [_ask(endpoint, question, show=show) for question in QUESTIONS]
            return answers, msgspec.convert(endpoint.get("/status"), resolved(ClusterStatus))
        except ConvoyError as error:
            local.reraise(error)


def _wait_until_served(local: LocalCluster, say: Callable[[str], None]) -> Endpoint:
    """Return the endpoint of the head, once its log has the address.

    Print the head's newest log line every 5 s until then. Raises PeerUnreachable after `_START_WAIT_S`.
    """
    began_s = said_s = time.monotonic()
    while (now_s := time.monotonic()) < began_s + _START_WAIT_S:
        local.check_alive()
        log = local.log_file(local.head).read_text()
        served = _SERVED.search(log)
        if served is not None:
            return Endpoint.of(served[1])
        if now_s - said_s >= _SAY_EVERY_S:
            said_s = now_s
            say(f"{now_s - began_s:.0f} s: {(log.splitlines() or ['starting'])[-1]}")
        time.sleep(0.05)
    raise PeerUnreachable(
        f"the head did not answer within {_START_WAIT_S:g} s", hint="`convoy doctor` checks this machine"
    )


def _ask(endpoint: Endpoint, question: str, *, show: bool) -> DemoReply:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": _MAX_TOKENS,
        "stream": True,
        "logprobs": True,
    }
    if show:
        print(f"> {question}")
    started = time.monotonic()
    first_s = 0.0
    pieces: list[str] = []
    tokens: list[tuple[tuple[int, ...], float]] = []
    for choice in _choices(endpoint.stream("/v1/chat/completions", body)):
        first_s = first_s or time.monotonic() - started
        text = choice.get("delta", {}).get("content") or ""
        pieces.append(text)
        if show:
            print(text, end="", flush=True)
        for token in (choice.get("logprobs") or {}).get("content") or []:
            tokens.append((tuple(token["bytes"] or ()), token["logprob"]))
    if show:
        print("\n")
    return DemoReply("".join(pieces), tuple(tokens), time.monotonic() - started, first_s)


def _choices(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for event in events:
        yield from event.get("choices", [])


def _sealed_bytes(status: ClusterStatus) -> int:
    return sum(stage.sealed_bytes_sent + stage.sealed_bytes_received for stage in status.stages)


def _print_summary(status: ClusterStatus, answers: list[DemoReply], *, equal: bool) -> None:
    longest = max(answers, key=lambda answer: len(answer.tokens))
    num_tokens = sum(len(answer.tokens) for answer in answers)
    print(f"{longest.tokens_per_s:.0f} tokens/s, {num_tokens} tokens in all")
    print(f"{format_bytes(_sealed_bytes(status))} sealed on the head's links, none in clear")
    print(f"tokens and log-probabilities equal those of one process: {'yes' if equal else 'NO'}")


def _facts(status: ClusterStatus, answers: list[DemoReply], *, equal: bool) -> dict[str, object]:
    return {
        "model": MODEL,
        "stages": status.stages,
        "route": status.route,
        "kernel": status.kernel,
        "answers": [
            {"question": question, "text": answer.text, "tokens": len(answer.tokens)}
            for question, answer in zip(QUESTIONS, answers, strict=True)
        ],
        "tokens_per_s": max(answers, key=lambda answer: len(answer.tokens)).tokens_per_s,
        "sealed_bytes": _sealed_bytes(status),
        "equal_to_one_process": equal,
    }
