"""Signed manifests of models that are one file."""

from __future__ import annotations

from pathlib import Path

from convoy.cli.model_files.manifest import sign
from convoy.crypto.identity import OperatorKey
from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from convoy.trust.signed_model import verify_signed_model
from support.quantised_models import Writer, library_model, write_gguf


def test_a_signed_gguf_file_has_its_settings_and_its_tokeniser_in_the_manifest(tmp_path: Path) -> None:
    words = {"tokens": [f"<word {number:03}>" for number in range(128)], "merges": ["a b"], "eos": 1}
    model = write_gguf(tmp_path / "model", Writer(library_model("llama")), "Q8_0", words).quantised
    key = OperatorKey.generate()
    key.save(tmp_path / "operator")
    sign(str(model), operator=tmp_path / "operator", out=tmp_path / "model.signed")
    data = (tmp_path / "model.signed").read_bytes()
    signed = verify_signed_model(data, operator_key=key.public_key)
    manifest = Manifest.decode(signed.manifest, signed.digest)
    assert manifest.files.keys() == {"config.json", "header.gguf"}
    assert make_manifest(ModelSource.resolve(str(model)), Hashing()).digest == signed.digest
    model.write_bytes(model.read_bytes().replace(b"<word 007>", b"<word bad>", 1))
    found = make_manifest(ModelSource.resolve(str(model)), Hashing())
    assert found.tensors == manifest.tensors
    assert found.digest != signed.digest
