"""Open a model by its name: a directory, a bundled model, or a name on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.config.files import default_cache
from convoy.errors import ConfigError, HubUnreachable, ModelError, Unavailable
from convoy.sdk.options import Note, head_options, signed_model, unheard

if TYPE_CHECKING:
    from convoy.cluster.head.head import LoadProgress
    from convoy.cluster.model_loader import KnownModel
    from convoy.cluster.weights.head_weights import HeadWeights
    from convoy.config.settings import Config
    from convoy.model.checkpoints.hub.files import Hub, HubName
    from convoy.model.checkpoints.source import ModelSource
    from convoy.trust.signed_model import SignedModel

# Errors of a pull that keep their class on the way from a head to the command.
PULL_ERRORS = (HubUnreachable, ModelError, Unavailable)
PULL_AGAIN = "pull it again once the hub answers: it goes on where it was"


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """Hold a model for a head. ``own`` is the source of its tensors, if this machine lacks some of them.

    ``also`` are further models that requests may name, by their names for clients.
    """

    source: ModelSource
    own: HeadWeights | None = None
    also: Mapping[str, ModelSource] = field(default_factory=dict)

    def known(self) -> list[KnownModel]:
        """Return the further models, each with its tokenizer."""
        from convoy.cluster.model_loader import KnownModel
        from convoy.model.text.tokens import Tokenizer

        return [KnownModel(name, source, Tokenizer(source)) for name, source in self.also.items()]


def with_also(
    settings: Config, first: OpenedModel, on_load: LoadProgress | None = None, note: Note = unheard
) -> OpenedModel:
    """Return ``first`` with the models of [serve] also.

    Raises ModelError, and ConfigError for two models of one name or settings that are for one model alone.
    """
    from convoy.model.checkpoints.source import ModelSource

    serve = settings.serve
    for given, why in (
        (serve.http_process and serve.keep_alive_s is not None, "--keep-alive and --http-process"),
        (serve.http_process and bool(serve.also), "--also and --http-process"),
        (settings.model.signed is not None and bool(serve.also), "--also and --signed"),
        (settings.plan.layers is not None and bool(serve.also), "--also and given layers"),
    ):
        if given:
            raise ConfigError(
                f"{why} came together, and they do not go together", hint="leave one of them out"
            )
    own = serve.served_model_name or first.source.name
    _check_name(own, "--served-model-name NAME names the model for clients")
    names, also = {own}, dict[str, ModelSource]()
    for text in serve.also:
        own_name, is_named, model = text.partition("=")
        if is_named and not (own_name and model):
            raise ConfigError(
                f"also is {text!r}, expected MODEL or NAME=MODEL", hint="for example --also small=demo-mini"
            )
        _check_name(own_name, "--also NAME=MODEL names the model for clients")
        source = ModelSource.resolve(local_model(settings, model if is_named else text, on_load, note))
        name = own_name if is_named else source.name
        if name in names:
            raise ConfigError(
                f"two models have the name {name!r}, expected one for each",
                hint=f"--also OTHER={model or text} names it OTHER",
            )
        head_options(settings).check_context(source.spec)
        names.add(name)
        also[name] = source
    return replace(first, also=also)


def _check_name(name: str, hint: str) -> None:
    """Check that a model's name can be shown: it stands in logs, metrics and on terminals."""
    if not name.isprintable():
        raise ConfigError(f"{name[:80]!r} cannot name a model: it has unprintable characters", hint=hint)


def local_model(
    settings: Config, named: str, on_load: LoadProgress | None = None, note: Note = unheard
) -> str:
    """Return ``named`` itself, or the directory with all files of ``org/name[@revision]``.

    Of a GGUF model, ``org/name[@revision]:FILE``, it is the file.

    ``on_load`` hears how much of all files is downloaded. Raises ModelError if they are not available.
    """
    name = _hub_name(named)
    if name is None:
        return named
    hub, files = _hub(settings), dict[str, tuple[int, int]]()

    def on_file(file: str, done: int, total: int) -> None:
        files[file] = done, total
        if on_load is not None:
            on_load(named, *(sum(part) for part in zip(*files.values(), strict=True)))

    commit, directory = hub.download(name, on_file)
    note(f"note: {hub.offline}" if hub.offline else f"model: {name.repo} at commit {commit}")
    return str(directory)


def describe_model(settings: Config, named: str, note: Note = unheard) -> ModelSource:
    """Return the description of a model, without its weights: of a hub's, only headers are fetched.

    Raises ModelError if there is no such model, or none that Convoy runs.
    """
    from convoy.model.checkpoints.hub.describe import describe_on_hub
    from convoy.model.checkpoints.source import ModelSource

    name = _hub_name(named)
    if name is None:
        return ModelSource.resolve(named)
    hub = _hub(settings)
    source = describe_on_hub(hub, name)
    if hub.offline:
        note(f"note: {hub.offline}")
    return source


def open_model(
    settings: Config, named: str, on_load: LoadProgress | None = None, note: Note = unheard
) -> OpenedModel:
    """Return the model for a head. For a signed commit of a hub, fetch only the files that are not weights
    now.

    Raises ModelError.
    """
    from convoy.model.checkpoints.source import ModelSource

    name, signed = _hub_name(named), signed_model(settings)
    if name is None or signed is None or not _is_of(name, signed):
        return OpenedModel(ModelSource.resolve(local_model(settings, named, on_load, note)))
    opened = _open_signed(settings, name, signed)
    commit = _signed_name(signed).revision
    note(f"model: {name.repo} at commit {commit}, signed by the operator; members fetch their own layers")
    return opened


def _open_signed(settings: Config, name: HubName, signed: SignedModel) -> OpenedModel:
    from convoy.cluster.weights.head_weights import HeadWeights
    from convoy.model.checkpoints.hub.stream import HubCommit
    from convoy.model.checkpoints.hub.weights import HubWeights
    from convoy.model.checkpoints.manifest import Manifest
    from convoy.model.checkpoints.store.parts import PartFile, is_whole
    from convoy.model.checkpoints.store.received import ReceivedModel

    on_hub = _signed_name(signed)
    hub = HubWeights(HubCommit(name.repo, on_hub.revision, settings.model.hub), on_hub.file)
    received = ReceivedModel(_cache(settings), Manifest.decode(signed.manifest, signed.digest))
    with received.open(lambda: None):
        for part in map(received.file, received.manifest.files):
            if is_whole(part):
                continue
            with PartFile(part) as file:
                file.begin_anew()
                for chunk in hub.stream_file(part):
                    file.write(chunk)
                if not file.finish():
                    raise ModelError(
                        f"{part.name} of {signed.hub} differs from the file that the operator signed",
                        hint="ask the operator to sign the hub's present files, or name another hub",
                    )
    source = received.source(name.repo, received.file("config.json"))
    return OpenedModel(source, HeadWeights(received, source, hub))


def _is_of(name: HubName, signed: SignedModel) -> bool:
    """Return whether the signed manifest is for that name, and for the requested revision and file."""
    from convoy.model.checkpoints.hub.gguf import fits_gguf

    if not signed.hub:
        return False
    on_hub = _signed_name(signed)
    is_file = not name.file or (bool(on_hub.file) and fits_gguf(name.file, on_hub.file))
    return on_hub.repo == name.repo and name.revision in {"main", on_hub.revision} and is_file


def _signed_name(signed: SignedModel) -> HubName:
    """Return the commit that the operator signed. Raises ModelError for a text that is none."""
    from convoy.model.checkpoints.hub.files import HubName

    found = HubName.read(signed.hub)
    if found is None:
        raise ModelError(f"the signed model names {signed.hub[:80]!r}, which is no commit of a hub")
    return found


def is_on_hub(named: str) -> bool:
    """Return whether ``named`` is a name on a hub, and no model of this machine."""
    return _hub_name(named) is not None


def _hub_name(named: str) -> HubName | None:
    from convoy.model.checkpoints.hub.files import HubName
    from convoy.model.checkpoints.source import needs_no_files

    return None if needs_no_files(named) else HubName.parse(named)


def _hub(settings: Config) -> Hub:
    from convoy.model.checkpoints.hub.files import FOLDER, Hub

    return Hub(_cache(settings) / FOLDER, settings.model.hub)


def _cache(settings: Config) -> Path:
    return settings.model.cache or default_cache()
