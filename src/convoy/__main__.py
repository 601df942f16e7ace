"""``python -m convoy``: the same as the console script."""

from convoy.cli.main import main

main()
