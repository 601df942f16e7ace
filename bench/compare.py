"""Run a comparison for developers: ``python bench/compare.py VERB``; bench/METHODOLOGY.md explains each."""

from __future__ import annotations

import typer

from comparisons.verbs.fair import fair
from comparisons.verbs.fit import fit
from comparisons.verbs.fleet import fleet_sim
from comparisons.verbs.llama import llama
from comparisons.verbs.providers import providers
from comparisons.verbs.soak import soak
from comparisons.verbs.start import start
from convoy.cli.main import main

app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
app.command()(fair)
app.command()(llama)
app.command()(fit)
app.command()(soak)
app.command()(start)
app.command()(providers)
app.command("fleet-sim")(fleet_sim)

if __name__ == "__main__":
    main(commands=app)
