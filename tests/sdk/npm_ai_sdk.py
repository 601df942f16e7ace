"""The AI SDK's three providers against real servers: `make test-sdk` installs them from npm and runs this.

The tests themselves are JavaScript: ``ai/judge.test.mjs``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import convoy.testing
from convoy.api.listen.options import ServeOptions
from convoy.engine.requests.request import GenerationRequest
from support.fake_service import FakeEngine, serving

FOLDER = Path(__file__).parent / "ai"
MODEL = "synthetic:agent"
_USER, _ASSISTANT = "<user>", "<assistant>"


def repeat_the_user(request: GenerationRequest) -> str:
    """Return the last text of the user, out of the form in which the scripted server spells a chat."""
    text = bytes(request.prompt_ids).decode()
    return text.rpartition(_USER)[2].removesuffix(_ASSISTANT)


def test_the_providers_read_every_answer_of_a_split_model() -> None:
    with (
        convoy.testing.serve(MODEL, members=2) as cluster,
        serving(
            FakeEngine(repeat_the_user), ServeOptions(port=0, store_responses=True), model=MODEL
        ) as scripted,
    ):
        node = shutil.which("node")
        assert node is not None
        done = subprocess.run(
            [node, "--test", "--test-reporter=spec", "judge.test.mjs"],
            cwd=FOLDER,
            env={
                **os.environ,
                "CLUSTER_URL": cluster.url.removesuffix("/v1"),
                "SCRIPTED_URL": scripted.url,
                "MODEL": MODEL,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
