"""``convoy manifest``: list a model's tensors and files with their hashes, and sign the list as operator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.audit import operator_log
from convoy.cli.operator.passphrase import PassphraseFlag
from convoy.cli.operator.roster_change import OPERATOR_DIRECTORY, load_operator
from convoy.cli.running.hub import local_model
from convoy.cli.show.output import JsonFlag, format_bytes, print_fields, print_json
from convoy.cli.show.progress import loading_bars
from convoy.config.files import default_cache, read_bytes, replace_file
from convoy.config.settings import decode_public_key, load_config

if TYPE_CHECKING:
    from convoy.config.settings import Config
    from convoy.model.checkpoints.manifest import Manifest
    from convoy.model.checkpoints.source import ModelSource

app = typer.Typer(help="Show, sign or verify the hashes of a model's tensors.", rich_markup_mode=None)

ModelArgument = Annotated[str, typer.Argument(help="A directory, org/name of the hub, or demo.")]
ConfigFlag = Annotated[Path | None, typer.Option(help="A convoy.toml, for [model] cache and hub.")]


@app.command()
def show(model: ModelArgument, config: ConfigFlag = None, as_json: JsonFlag = False) -> None:
    """Hash a model, and show its digest."""
    source, manifest = _made(load_config(config), model, quiet=as_json)
    _print(source.name, manifest, as_json=as_json)


@app.command()
def sign(
    model: ModelArgument,
    operator: Annotated[Path, typer.Option(help="Directory of the operator's key.")] = OPERATOR_DIRECTORY,
    passphrase_file: PassphraseFlag = None,
    out: Annotated[Path, typer.Option(help="Where the signed manifest goes.")] = Path("model.signed"),
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Hash a model, and sign the result. Members with `signed` in their [model] run no other model."""
    from convoy.model.checkpoints.hub.files import commit_of
    from convoy.trust.signed_model import sign_model

    key = load_operator(operator, passphrase_file)
    source, manifest = _made(load_config(config), model, quiet=as_json)
    hub = commit_of(source.path)
    subject = {"model": source.name[:256], "hub": hub[:256], "manifest": manifest.digest}
    with operator_log(operator, key).doing("sign model", subject):
        replace_file(out, sign_model(source.name, hub, manifest.encoded, key))
    more = {"hub": hub, "operator_key": key.public_key.hex(), "file": str(out)}
    _print(source.name, manifest, more, as_json=as_json)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A signed manifest.")],
    operator_key: Annotated[
        str | None, typer.Option(help="The operator's public key.  [default: that in --config]")
    ] = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a signed manifest, and show the model that it is for."""
    from convoy.model.checkpoints.manifest import Manifest
    from convoy.trust.signed_model import MAX_SIGNED_BYTES, verify_signed_model

    settings = load_config(config)
    key = (
        settings.require_operator_key()
        if operator_key is None
        else decode_public_key(operator_key, "--operator-key")
    )
    signed = verify_signed_model(read_bytes(file, max_bytes=MAX_SIGNED_BYTES), operator_key=key)
    manifest = Manifest.decode(signed.manifest, signed.digest)
    _print(signed.model, manifest, {"hub": signed.hub, "operator_key": key.hex()}, as_json=as_json)


def _made(settings: Config, model: str, *, quiet: bool) -> tuple[ModelSource, Manifest]:
    from convoy.model.checkpoints.source import ModelSource
    from convoy.model.checkpoints.store.digests import Hashing, make_manifest

    source = ModelSource.resolve(local_model(settings, model, quiet=quiet))
    hashing = Hashing(settings.model.cache or default_cache(), settings.model.num_threads or 0)
    with loading_bars(quiet=quiet) as on_load:

        def progress(done: int, total: int) -> None:
            if on_load is not None:
                on_load("digests", done, total)

        return source, make_manifest(source, hashing, progress)


def _print(model: str, manifest: Manifest, more: dict[str, str] | None = None, *, as_json: bool) -> None:
    size = sum(entry.num_bytes for entry in manifest.tensors.values())
    fields: dict[str, object] = {"model": model, "digest": manifest.digest, **(more or {})}
    fields |= {"tensors": len(manifest.tensors), "files": len(manifest.files)}
    if as_json:
        print_json(fields | {"bytes": size})
    else:
        print_fields((fields | {"size": format_bytes(size)}).items())
