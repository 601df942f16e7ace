"""A model by its name on the Hugging Face hub: one commit of it on this disk, weights and text files alone.

`huggingface_hub` does the transfer: files that came whole stay, and within one call it goes on after a broken
connection. Which files are had is decided here: those of `model.manifest.FILES`, and the safetensors that the
index names.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from convoy.errors import ModelError
from convoy.model.checkpoint import INDEX, SINGLE, file_bytes, index_files
from convoy.model.library import LIBRARY
from convoy.model.manifest import FILES

HubProgress = Callable[[str, int, int], None]  # file, bytes that are here, bytes in all

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}"
_FORM = re.compile(rf"(?P<repo>{_PART}/{_PART})(@(?P<revision>{_REVISION}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA = re.compile(r"[0-9a-f]{64}", re.ASCII)
_READ_BYTES = 1 << 20
_MAX_PIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubName:
    """``org/name[@revision]``; a revision is a branch, a tag or a commit."""

    repo: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """None for what can be no name on the hub, and for a directory that is here."""
        match = _FORM.fullmatch(text)
        if match is None or ".." in text or Path(text).exists():
            return None
        return cls(match["repo"], match["revision"] or "main")

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a revision was when somebody last looked: a commit, and the SHA-256 of its large files."""

    commit: str
    files: Mapping[str, str] = field(default_factory=dict)  # "" where the hub knows no SHA-256


class Hub:
    """``folder`` is private to this user; ``endpoint`` None is the hub that `huggingface_hub` is set to."""

    def __init__(self, folder: Path, endpoint: str | None = None) -> None:
        self._folder = folder
        self._endpoint = endpoint
        self.offline: str | None = None  # why a commit that was pinned earlier is used unasked

    def download(self, name: HubName, progress: HubProgress | None = None) -> tuple[str, Path]:
        """The commit, and the directory that holds it whole. What is here already is not fetched again.

        Raises ModelError naming the repository, and the file where one cannot be had or is not what the hub
        lists. What ``progress`` raises ends it; a later call goes on.
        """
        with LIBRARY:
            import huggingface_hub  # noqa: F401 - a second, and nothing of it before a name asks for it
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        pinned = self._pin(name)
        found = [file for file in (*FILES, INDEX) if file in pinned.files]
        for file in found:
            self._fetch(name, pinned, file, progress)
        directory = self._path(name, pinned, "config.json", progress).parent
        for shard in self._shards(name, pinned, directory):
            self._fetch(name, pinned, shard, progress)
        return pinned.commit, directory

    def _pin(self, name: HubName) -> Pinned:
        """The commit that a revision is now; where nobody can say, what it was the last time."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        remembered = self._folder / f"{hashlib.sha256(str(name).encode()).hexdigest()[:32]}.json"
        try:
            info = HfApi(endpoint=self._endpoint).model_info(
                name.repo, revision=name.revision, files_metadata=True
            )
        except HfHubHTTPError as error:
            raise _refused(name, error) from error
        except Exception as error:
            known = _remembered(remembered)
            if known is None:
                raise ModelError(
                    f"the hub cannot be reached for {name}: {_line(error)}",
                    hint="give a directory, or try again; a peer needs no --model if its head has the files",
                ) from error
            self.offline = f"the hub cannot be reached; {name} was {known.commit[:12]} the last time"
            return known
        if info.sha is None or _COMMIT.fullmatch(info.sha) is None:
            raise ModelError(f"the hub names no commit for {name}")
        pinned = Pinned(info.sha, _listed(info.siblings or ()))
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

    def _fetch(self, name: HubName, pinned: Pinned, file: str, progress: HubProgress | None) -> None:
        """One file, whole and with the digest that the hub lists."""
        expected = pinned.files[file]
        path = self._path(name, pinned, file, progress)
        seen = path.with_name(f".{file}.verified")
        if not expected or seen.exists():
            return
        with _explained(name, file):
            digest = hashlib.sha256()
            with path.open("rb", buffering=0) as data:
                while chunk := data.read(_READ_BYTES):
                    digest.update(chunk)
            found = digest.hexdigest()
            if found != expected:
                path.resolve().unlink()
                path.unlink(missing_ok=True)
                raise ModelError(
                    f"{file} of {name} came with the digest {found[:12]}, expected {expected[:12]}",
                    hint="it was removed: start again to fetch it anew",
                )
            seen.touch()

    def _path(self, name: HubName, pinned: Pinned, file: str, progress: HubProgress | None) -> Path:
        from huggingface_hub import hf_hub_download

        if file not in pinned.files:
            raise ModelError(f"{name} has no {file}", hint="is it a model for `transformers`?")
        with _explained(name, file), LIBRARY:
            path = hf_hub_download(
                name.repo,
                file,
                revision=pinned.commit,
                cache_dir=self._folder,
                endpoint=self._endpoint,
                tqdm_class=_reporting(file, progress),
            )
        return Path(str(path))


def _listed(siblings: Iterable[Any]) -> dict[str, str]:
    """The files that could be read, by names that lie in no folder."""
    found = {}
    for sibling in siblings:
        file = str(sibling.rfilename)
        if file in FILES or file == INDEX or (file.endswith(".safetensors") and Path(file).name == file):
            lfs = getattr(sibling, "lfs", None)
            sha = str(getattr(lfs, "sha256", "") or "")
            found[file] = sha if _SHA.fullmatch(sha) else ""
    return found


def _remembered(path: Path) -> Pinned | None:
    try:
        said = json.loads(file_bytes(path, _MAX_PIN_BYTES))
        pinned = Pinned(str(said["commit"]), {str(f): str(sha) for f, sha in said["files"].items()})
    except (ModelError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return pinned if _COMMIT.fullmatch(pinned.commit) else None


def _refused(name: HubName, error: Exception) -> ModelError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in {401, 403, 404}:
        return ModelError(
            f"the hub has no {name} for you (HTTP {status})",
            hint="look at the name; for a gated model `hf auth login` first",
        )
    return ModelError(f"the hub refused {name}: {_line(error)}", hint="try again later")


@contextmanager
def _explained(name: HubName, file: str) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        if error.errno is None:
            raise _lost(name, file, error) from error
        reason = (error.strerror or "unusable").lower()
        raise ModelError(
            f"{file} of {name} cannot be stored: {reason}",
            hint="what came so far stays: make room and start again",
        ) from error
    except Exception as error:
        raise _lost(name, file, error) from error


def _lost(name: HubName, file: str, error: Exception) -> ModelError:
    return ModelError(
        f"{file} of {name} cannot be fetched: {_line(error)}",
        hint="what came so far stays: start again to go on",
    )


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _reporting(file: str, progress: HubProgress | None) -> Any:
    """What the library takes for a progress bar: it draws nothing, and says how many bytes are here."""

    class Reporting:
        _lock = threading.RLock()

        def __init__(self, *_: object, total: int | None = None, initial: int = 0, **__: object) -> None:
            self.total, self.n = total, initial

        def update(self, num_bytes: float | None = 1) -> None:
            self.n += int(num_bytes or 0)
            if progress is not None:
                progress(file, self.n, self.total or self.n)

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            self.close()

        def close(self) -> None:
            pass

        @classmethod
        def get_lock(cls) -> threading.RLock:
            return cls._lock

        def __getattr__(self, _name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    return Reporting
