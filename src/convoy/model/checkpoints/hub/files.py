"""Download one commit of a model from the Hugging Face hub: its weights and text files alone.

    FOLDER/models--org--name/snapshots/<commit>/config.json, model-00001-of-00002.safetensors, ...
                                                *.part       incomplete: a later run resumes at its end

This module decides which files are downloaded: those of `FILES`, and the safetensors files that the index
names, or those of one GGUF model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from convoy.errors import HubUnreachable, ModelError
from convoy.model.checkpoints.checkpoint import INDEX, SINGLE, file_bytes, index_files
from convoy.model.checkpoints.formats.gguf.split import SUFFIX
from convoy.model.checkpoints.hub.gguf import choose_gguf
from convoy.model.checkpoints.hub.stream import RETRY_WAIT_S, HubCommit, hub_errors
from convoy.model.checkpoints.manifest import FILES, MAX_FILE_BYTES
from convoy.model.checkpoints.store.parts import (
    ModelPart,
    PartFile,
    alone_in,
    explained,
    is_whole,
    require_room,
)
from convoy.model.library import LIBRARY

_NO_HUB = "check the address of hub under [model]; without it the public hub is asked"

# file name, bytes received so far, total bytes
HubProgress = Callable[[str, int, int], None]

# the folder's name inside a cache
FOLDER = "hub"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}"
# a file or a quantisation; the wire has the same pattern (`wire.messages.control`)
_FILE = r"[A-Za-z0-9][A-Za-z0-9._+/-]{0,199}"
_FORM = re.compile(rf"(?P<repo>{_PART}/{_PART})(@(?P<revision>{_REVISION}))?(:(?P<file>{_FILE}))?", re.ASCII)
_GGUF = re.compile(_FILE, re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_PIN_BYTES = 1 << 20
_UNSAID = -1


@dataclass(frozen=True, slots=True)
class HubName:
    """Hold a name ``org/name[@revision][:FILE]``; a revision is a branch, a tag or a commit.

    ``file`` is a GGUF file, or the quantisation that ends its name; empty for the only model there is.
    """

    repo: str
    revision: str = "main"
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse a name on the hub; None if the text cannot be one, and for an existing local directory."""
        return None if Path(text).exists() else cls.read(text)

    @classmethod
    def read(cls, text: str) -> HubName | None:
        """Parse a name on the hub, whatever lies on this machine; None if the text cannot be one."""
        match = _FORM.fullmatch(text)
        if match is None or ".." in text:
            return None
        return cls(match["repo"], match["revision"] or "main", match["file"] or "")

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" + (f":{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True)
class HubFile:
    """Describe a file as the hub lists it.

    ``digest`` is its SHA-256, or empty: the hub knows it for large files only. ``num_bytes`` is -1 if the hub
    does not list the size.
    """

    num_bytes: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Hold the commit to which a revision resolved at the last query, and that commit's readable files."""

    commit: str
    files: Mapping[str, HubFile] = field(default_factory=dict)


class Hub:
    """Download models into ``folder``, which is private to this user.

    ``endpoint`` None means the hub that `huggingface_hub` is configured for. ``retry_wait_s`` is as for a
    `HubCommit`.
    """

    def __init__(
        self, folder: Path, endpoint: str | None = None, *, retry_wait_s: float = RETRY_WAIT_S
    ) -> None:
        self._retry_wait_s = retry_wait_s
        self._folder = folder
        self._endpoint = endpoint
        # the reason why a commit pinned earlier is used without asking the hub
        self.offline: str | None = None

    def download(self, name: HubName, progress: HubProgress | None = None) -> tuple[str, Path]:
        """Download a model, and return its commit and the directory that holds it whole, or its GGUF file.

        Files that are already complete are not fetched again. An exception of ``progress`` ends the download;
        a later call resumes it. Raises ModelError naming the repository, and the file if one cannot be
        fetched or differs from the hub's list.
        """
        pinned = self.pin(name)
        directory = self.directory(name, pinned.commit)
        fetch = _Download(name, self.at(name, pinned), directory, progress)
        with alone_in(directory, lambda: None):
            chosen = gguf_files(name, pinned)
            if chosen:
                fetch.all(_parts(name, pinned, directory, chosen))
                return pinned.commit, directory / chosen[0]
            fetch.all(_parts(name, pinned, directory, [f for f in (*FILES, INDEX) if f in pinned.files]))
            if "config.json" not in pinned.files:
                raise ModelError(f"{name} has no config.json", hint="is it a model for `transformers`?")
            fetch.all(_parts(name, pinned, directory, self._shards(name, pinned, directory)))
        return pinned.commit, directory

    def directory(self, name: HubName, commit: str) -> Path:
        """Return the directory for that commit's files, whether or not they exist."""
        return self._folder / f"models--{name.repo.replace('/', '--')}" / "snapshots" / commit

    def at(self, name: HubName, pinned: Pinned) -> HubCommit:
        """Return the commit, whose files can be read by ranges."""
        return HubCommit(name.repo, pinned.commit, self._endpoint, self._retry_wait_s)

    def downloaded(self, name: HubName, pinned: Pinned) -> Path | None:
        """Return what `download` would, if its files are complete here; None if any of them is missing."""
        directory = self.directory(name, pinned.commit)
        files = gguf_files(name, pinned)
        path = directory / files[0] if files else directory
        if not files:
            if INDEX in pinned.files and not (directory / INDEX).is_file():
                return None
            shards = index_files(directory / INDEX) if INDEX in pinned.files else [SINGLE]
            files = [*(file for file in (*FILES, INDEX) if file in pinned.files), *shards]
        if not set(files) <= pinned.files.keys():
            return None
        return path if all(map(is_whole, _parts(name, pinned, directory, files))) else None

    def pin(self, name: HubName) -> Pinned:
        """Return the current commit of a revision, or the remembered one if the hub cannot be reached.

        Raises HubUnreachable, and ModelError for a repository that does not exist, or not for this user, and
        for a folder that cannot be made.
        """
        with explained(self._folder, "made"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with LIBRARY:
            # the import takes about a second, so it waits until a name needs it
            from huggingface_hub import HfApi

        # All files of a revision have one pin.
        revision = f"{name.repo}@{name.revision}"
        remembered = self._folder / f"{hashlib.sha256(revision.encode()).hexdigest()[:32]}.json"
        try:
            with hub_errors(str(name)):
                info = HfApi(endpoint=self._endpoint).model_info(
                    name.repo, revision=name.revision, files_metadata=True
                )
        except HubUnreachable as error:
            known = _remembered(remembered)
            if known is None:
                raise HubUnreachable(
                    f"the model {error.message}",
                    hint="give a directory, or try again; a peer needs no --model if its head has the files",
                    public=None if error.public is None else f"the model {error.public}",
                ) from error
            self.offline = (
                f"the hub cannot be reached; using {known.commit[:12]}, the last known commit of {name}"
            )
            return known
        except json.JSONDecodeError as error:
            raise ModelError(
                f"the server that answers for {name} is not a hub: it sent no JSON", hint=_NO_HUB
            ) from error
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            # the library does not validate the answer, and fails in many ways on unexpected data
            raise ModelError(
                f"the server that answers for {name} is not a hub: it described no model", hint=_NO_HUB
            ) from error
        if not isinstance(info.sha, str) or _COMMIT.fullmatch(info.sha) is None:
            raise ModelError(
                f"the hub names no commit for {name}",
                hint="check the name and the revision: org/name@revision",
            )
        pinned = Pinned(info.sha, _listed(info.siblings or ()))
        with explained(remembered, "written"):
            remembered.write_text(json.dumps(asdict(pinned)))
        return pinned

    def _shards(self, name: HubName, pinned: Pinned, directory: Path) -> list[str]:
        shards = index_files(directory / INDEX) if INDEX in pinned.files else [SINGLE]
        lacking = next((shard for shard in shards if shard not in pinned.files), None)
        if lacking is not None:
            raise ModelError(
                f"{name} has no {lacking}",
                hint="only safetensors are read: look for a conversion of the model",
            )
        return shards


def snapshot_of(path: Path) -> Path | None:
    """Return the directory of a commit in a hub's cache that ``path`` is or lies in; None without one."""
    found = next((one for one in (path, *path.parents) if one.parent.name == "snapshots"), None)
    is_one = found is not None and found.parent.parent.name.startswith("models--")
    return found if is_one and found is not None and _COMMIT.fullmatch(found.name) else None


def commit_of(path: Path) -> str:
    """Return ``org/name@commit`` for a directory in a hub's cache, and "" for any other path.

    A GGUF file in that directory has ``:FILE`` behind it.
    """
    directory = snapshot_of(path)
    if directory is None or (path != directory and path.suffix != SUFFIX):
        return ""
    repo = directory.parent.parent.name.partition("--")[2].replace("--", "/", 1)
    file = "" if path == directory else f":{path.relative_to(directory).as_posix()}"
    name = f"{repo}@{directory.name}{file}"
    return "" if HubName.read(name) is None else name


@dataclass(frozen=True, slots=True)
class _Download:
    """Download files of one commit into ``directory``."""

    name: HubName
    commit: HubCommit
    directory: Path
    progress: HubProgress | None

    def all(self, parts: Iterable[ModelPart]) -> None:
        missing = [part for part in parts if not is_whole(part)]
        for folder in {part.place.parent for part in missing} - {self.directory}:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_room(self.directory, missing)
        # A watcher adds up all files from the beginning.
        for part in missing:
            self._tell(part, 0)
        for part in missing:
            self._file(part)

    def _file(self, part: ModelPart) -> None:
        with ExitStack() as stack:
            file = stack.enter_context(PartFile(part, lambda _num_bytes: self._tell(part, 0)))
            resumed = file.resumed
            for chunk in self.commit.stream(part.name, file.num_bytes, part.num_bytes):
                file.write(chunk)
                self._tell(part, file.num_bytes)
            found = file.found
            if file.finish():
                return
        # the bytes of an earlier run may have been another version's, or damaged by a crash: start over once
        if resumed:
            self._file(part)
            return
        raise ModelError(
            f"{part.name} of {self.name} came with the digest {found[:12]}, expected {part.digest[:12]}",
            hint="it was removed: start again to fetch it anew",
        )

    def _tell(self, part: ModelPart, num_bytes: int) -> None:
        if self.progress is not None:
            self.progress(part.name, num_bytes, part.num_bytes)


def _parts(name: HubName, pinned: Pinned, directory: Path, files: Iterable[str]) -> list[ModelPart]:
    parts = []
    for file in files:
        listed = pinned.files[file]
        # without a size, a truncated file would be accepted as complete
        if listed.num_bytes < 0:
            raise ModelError(f"the hub lists no size for {file} of {name}, so a download cannot be verified")
        if listed.num_bytes > MAX_FILE_BYTES and not file.endswith((".safetensors", SUFFIX)):
            raise ModelError(
                f"{file} of {name} has {listed.num_bytes} bytes, expected at most {MAX_FILE_BYTES}"
            )
        parts.append(ModelPart(file, directory / file, listed.num_bytes, listed.digest))
    return parts


def _listed(siblings: Iterable[Any]) -> dict[str, HubFile]:
    """Return the files that Convoy reads. Only GGUF files may lie in a sub-folder."""
    found = {}
    for sibling in siblings:
        file = str(sibling.rfilename)
        is_gguf = file.endswith(SUFFIX) and _GGUF.fullmatch(file) is not None and ".." not in file
        is_shard = file.endswith(".safetensors") and Path(file).name == file
        if file in FILES or file == INDEX or is_shard or is_gguf:
            lfs = getattr(sibling, "lfs", None)
            sha = str(getattr(lfs, "sha256", "") or "")
            size = sibling.size if type(sibling.size) is int and sibling.size >= 0 else _UNSAID
            found[file] = HubFile(size, sha if _SHA.fullmatch(sha) else "")
    return found


def gguf_files(name: HubName, pinned: Pinned) -> list[str]:
    """Return the files of the GGUF model that ``name`` means; none if it means a model of safetensors.

    Raises ModelError as `choose_gguf` does.
    """
    has_gguf = any(file.endswith(SUFFIX) for file in pinned.files)
    if not name.file and ({SINGLE, INDEX} & pinned.files.keys() or not has_gguf):
        return []
    return choose_gguf(str(name), name.file, pinned.files.keys())


def _remembered(path: Path) -> Pinned | None:
    try:
        said = json.loads(file_bytes(path, _MAX_PIN_BYTES))
        files = {
            str(name): HubFile(int(f["num_bytes"]), str(f["digest"])) for name, f in said["files"].items()
        }
        pinned = Pinned(str(said["commit"]), files)
    except (ModelError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return pinned if _COMMIT.fullmatch(pinned.commit) else None
