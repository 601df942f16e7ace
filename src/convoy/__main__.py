"""The command's entry, also as ``python -m convoy``. It imports nothing that only some systems have."""

import sys

from convoy.cli.show.exit_codes import EXIT_CONFIG
from convoy.cli.show.output import report_error


def main(platform: str = sys.platform) -> None:
    """Run the command line; refuse a system on which it cannot run before anything else is imported."""
    if platform == "win32":
        report_error(
            "ConfigError",
            "Convoy does not run on Windows itself",
            "run it in WSL2: `wsl --install`, then install Convoy inside that Linux",
            as_json="--json" in sys.argv,
        )
        raise SystemExit(EXIT_CONFIG)
    from convoy.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
