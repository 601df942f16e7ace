"""Load one of the models that a head knows into its running cluster, and say how far each is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from convoy.cluster.running import RunningCluster
from convoy.cluster.status import ClusterStatus, ModelStatus
from convoy.cluster.weights.head_weights import HeadWeights
from convoy.engine.engine import RequestHandle
from convoy.engine.outputs import Output
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import CapacityError, NotReady, PlanError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.text.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Hold a model that a head may run. ``name`` is its name for clients."""

    name: str
    source: ModelSource
    tokenizer: Tokenizer
    own: HeadWeights | None = None


class LoadedEngine:
    """Stand for the engine of a model. While another model is loaded, it knows the room alone."""

    def __init__(self, loader: ModelLoader, model: KnownModel) -> None:
        self._loader = loader
        self._model = model

    @property
    def room(self) -> int:
        """Return the tokens of a request: those of the engine, or the model's whole context."""
        loader = self._loader
        if loader.loaded == self._model.name:
            return loader.cluster.engine.room
        return loader.cluster.head.context_of(self._model.source.spec)

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None]) -> RequestHandle:
        """Submit a request as `Engine.submit` does. Raises `NotReady` while the model is not loaded."""
        if self._loader.loaded != self._model.name:
            text = f"{self._model.name} is not loaded"
            raise NotReady(text, public=text)
        return self._loader.cluster.engine.submit(request, on_output)


class ModelLoader:
    """Run one of several models at a time. One thread at once may load and unload; any may look."""

    def __init__(self, cluster: RunningCluster, models: Sequence[KnownModel]) -> None:
        """Take over a cluster that runs the first of ``models``."""
        self.cluster = cluster
        self.models = {model.name: model for model in models}
        # The models that run, and that is being loaded, by name.
        self.loaded: str | None = models[0].name
        self._loading: str | None = None
        self._last = models[0].name
        self._lock = threading.Lock()
        # Loaded and total bytes by member.
        self._progress: dict[str, tuple[int, int]] = {}

    def check_fit(self, name: str) -> None:
        """Raise `CapacityError` with the planner's reason if the connected members cannot hold a model."""
        try:
            self.cluster.head.check_fit(self.models[name].source)
        except PlanError as error:
            raise CapacityError(
                f"{name} does not fit the members that are here: {error.message}", hint=error.hint
            ) from error

    def load(self, name: str) -> None:
        """Unload the present model, and load this one. No request may run.

        Raises `CapacityError` while the present model still runs, if this one does not fit. Raises as
        `RunningCluster.load` does with no model loaded.
        """
        model = self.models[name]
        self.check_fit(name)
        with self._lock:
            self._loading, self._progress = name, {}
        try:
            self.loaded = None
            # Any client may read this without a key, so it names no model.
            self.cluster.unload("a model is being loaded")
            self.cluster.load(model.source, model.tokenizer, own=model.own, on_load=self._note)
            self.loaded = self._last = name
        except BaseException:
            self.cluster.asleep = "no model is loaded, because the last one could not be; a request loads one"
            self.cluster.has_failed = True
            raise
        finally:
            with self._lock:
                self._loading = None

    def unload(self) -> None:
        """Unload the present model. No request may run."""
        self.loaded = None
        self.cluster.unload("no model is loaded; a request loads one")

    @property
    def named(self) -> str:
        """Return the name of the model whose numbers the engine has: the loaded one, or the last."""
        return self._last

    def status(self, *, measures: bool = True) -> ClusterStatus:
        """Return the cluster's status with the state of every model; see `RunningCluster.status`."""
        found = self.cluster.status(foresees=True, measures=measures)
        # By its name in every API, which may not be that of its files.
        return msgspec.structs.replace(found, model=self.named, models=self.report())

    def report(self) -> list[ModelStatus]:
        """Return the state of each model."""
        with self._lock:
            loading, progress = self._loading, dict(self._progress)
        return [
            ModelStatus(
                name,
                "loading" if name == loading else "loaded" if name == self.loaded else "unloaded",
                progress if name == loading else {},
            )
            for name in self.models
        ]

    def close(self) -> None:
        """Close the tokenizers. Call it when the cluster is closed."""
        for model in self.models.values():
            model.tokenizer.close()

    def _note(self, member: str, done: int, total: int) -> None:
        with self._lock:
            self._progress[member] = done, total
