"""Pull a model of a hub onto every member of a running cluster, while the cluster goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from convoy.cluster.head.head import Head
from convoy.cluster.status import PullStatus
from convoy.config.settings import Config
from convoy.errors import ConvoyError, HubUnreachable, LinkClosed, PlanError, RequestError, Unavailable
from convoy.model.checkpoints.source import ModelSource
from convoy.sdk.models import PULL_AGAIN, PULL_ERRORS, describe_model, is_on_hub, local_model

_log = logging.getLogger(__name__)


class ModelPuller:
    """Run one pull at a time, on a thread of its own. Any thread may call it."""

    def __init__(self, head: Head, settings: Config) -> None:
        self._head = head
        self._settings = settings
        self._lock = threading.Lock()
        self._state: PullStatus | None = None
        self._progress: dict[str, tuple[int, int]] = {}
        self._ends = threading.Event()

    def report(self) -> PullStatus | None:
        """Return the state of the last pull; None before the first."""
        with self._lock:
            state, progress = self._state, dict(self._progress)
        return None if state is None else msgspec.structs.replace(state, progress=progress)

    def start(self, name: str) -> None:
        """Begin to pull a model. Raises `RequestError` for a name that cannot be pulled, and while one is."""
        if not is_on_hub(name):
            raise RequestError(f"{name[:200]!r} is no model of a hub, expected org/name[@revision][:QUANT]")
        if self._settings.model.signed is not None:
            raise RequestError("this cluster runs one signed model alone, so it pulls no others")
        with self._lock:
            if self._state is not None and self._state.state in {"pulling", "stopping"}:
                raise RequestError(
                    f"another model is being pulled: {self._state.name}",
                    code="pull_running",
                )
            self._ends, self._progress = threading.Event(), {}
            self._state = PullStatus(name, "pulling")
            threading.Thread(target=self._run, args=(name, self._ends), name="pull", daemon=True).start()

    def stop(self) -> None:
        """End the pull that runs, soon. What came stays, and a later pull goes on from there."""
        self._ends.set()
        with self._lock:
            if self._state is not None and self._state.state == "pulling":
                self._state = PullStatus(self._state.name, "stopping")

    def _run(self, name: str, ends: threading.Event) -> None:
        def watch() -> None:
            if ends.is_set():
                raise LinkClosed("the pull was stopped")
            if self._head.peers.closed_within(0):
                raise LinkClosed("the head is shutting down")

        end = PullStatus(name, "failed", error="internal error; the head's log has more")
        try:
            members = {self._head.name} | self._pull(name, watch)
            # A member that was lost meanwhile has its part no more.
            with self._lock:
                self._progress = {one: self._progress.get(one, (0, 0)) for one in members}
            end = PullStatus(name, "pulled")
        except ConvoyError as error:
            end = _end_of(name, error, is_stopped=ends.is_set())
            _log.warning("pull of model=%s: %s", name, error.message)
        except Exception:  # noqa: BLE001 - logged whole, and the state must not stay as it is
            _log.exception("%s could not be pulled", name)
        finally:
            with self._lock:
                self._state = end
            _log.info("pull of model=%s ended: %s %s", name, end.state, end.error)

    def _pull(self, name: str, watch: Callable[[], None]) -> set[str]:
        head, settings = self._head, self._settings
        # Say what does not fit before its weights are downloaded.
        head.check_fit(describe_model(settings, name))

        def on_download(_name: str, done: int, total: int) -> None:
            watch()
            self._tell(head.name, done, total)

        source = ModelSource.resolve(local_model(settings, name, on_download))
        return head.pull.run(source, watch, self._tell)

    def _tell(self, member: str, done: int, total: int) -> None:
        with self._lock:
            self._progress[member] = done, total


def _end_of(name: str, error: ConvoyError, *, is_stopped: bool) -> PullStatus:
    """Return the state after an error, in words that every reader of the status may see."""
    if is_stopped:
        return PullStatus(name, "stopped", error="the pull was stopped")
    if isinstance(error, LinkClosed):
        text = "the head is shutting down"
        error = Unavailable(text, public=text, hint="pull it again once it runs: it goes on where it was")
    if isinstance(error, HubUnreachable):
        error.hint = PULL_AGAIN
    # A plan knows layers, sizes and names of members alone.
    said = error.message if isinstance(error, PlanError | RequestError) else error.public
    kind = next((one.__name__ for one in PULL_ERRORS if isinstance(error, one)), "")
    if said is None:
        return PullStatus(name, "failed", error="the head's log has the reason", error_type=kind)
    return PullStatus(name, "failed", error=said, hint=error.hint or "", error_type=kind)
