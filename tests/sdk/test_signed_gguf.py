"""A signed GGUF model that a head opens by its name on a hub: settings first, and weights when needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convoy.config.settings import load_config
from convoy.crypto.identity import OperatorKey
from convoy.errors import ModelError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.model.stage import StageOptions
from convoy.sdk.models import OpenedModel, open_model
from convoy.trust.signed_model import sign_model
from convoy.wire.messages.control import StageAssignment
from support.fake_hub import COMMIT, REPO, FakeHub
from support.quantised_models import Writer, library_model, write_gguf
from support.tiny_models import Chain

pytestmark = pytest.mark.outside
FILE = "tiny-Q8_0.gguf"


def logits(source: ModelSource) -> torch.Tensor:
    whole = StageAssignment("m", 0, source.spec.num_layers, True, True)
    stage = HostStage.load(source, whole, StageOptions(require_tags=False))
    (found,) = Chain([stage]).run((0, list(range(1, 20))))
    return found


def test_a_signed_gguf_model_opens_by_its_name_and_has_the_logits_of_the_file(tmp_path: Path) -> None:
    served = tmp_path / "served"
    write_gguf(served, Writer(library_model("llama")), "Q8_0")
    (served / "model.gguf").rename(served / FILE)
    file, key = ModelSource.resolve(str(served / FILE)), OperatorKey.generate()
    manifest = make_manifest(file, Hashing())
    signed = sign_model("tiny", f"{REPO}@{COMMIT}:{FILE}", manifest.encoded, key)
    hub = FakeHub(served)

    def opened(signature: bytes, asked: str) -> OpenedModel:
        (tmp_path / "model.signed").write_bytes(signature)
        config = tmp_path / "convoy.toml"
        config.write_text(
            f'[cluster]\noperator_key = "{key.public_key.hex()}"\n[model]\nhub = "{hub.url}"\n'
            f'signed = "{tmp_path / "model.signed"}"\ncache = "{tmp_path / "cache"}"\n',
            encoding="utf-8",
        )
        return open_model(load_config(config), f"{REPO}:{asked}")

    try:
        with pytest.raises(ModelError, match="the signed model does not hold: it was changed"):
            opened(signed.replace(b'"tiny"', b'"tidy"'), "Q8_0")
        assert not hub.served
        found = opened(signed, "Q8_0")
        own = found.own
        assert own is not None
        assert own.manifest.digest == manifest.digest
        tensors = tmp_path / "cache" / "models" / manifest.digest / "tensors"
        assert not any(path.stat().st_size for path in tensors.glob("*"))
        whole = StageAssignment("m", 0, file.spec.num_layers, True, True)
        own.make_ready(whole, lambda: None, lambda *_: None)
        assert any(path.stat().st_size for path in tensors.glob("*"))
        assert torch.equal(logits(found.source), logits(file))
        own.close()
    finally:
        hub.close()
