"""What no operator can vouch for."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.cli.manifest import sign
from convoy.crypto.identity import OperatorKey
from convoy.errors import ModelError
from support.quantised_models import Writer, library_model, write_gguf


def test_a_gguf_file_is_not_signed_because_its_settings_are_in_no_manifest(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model", Writer(library_model("llama")), "Q8_0").quantised
    OperatorKey.generate().save(tmp_path / "operator")
    with pytest.raises(ModelError, match="cannot be signed: a manifest covers the tensors"):
        sign(str(model), operator=tmp_path / "operator", out=tmp_path / "model.signed")
    assert not (tmp_path / "model.signed").exists()
