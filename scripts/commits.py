"""Check the messages of commits: a short subject of one topic, and a body that says why.

    python scripts/commits.py BASE [NEW]    the commits that NEW (HEAD by default) has and BASE has not

Run it before a branch is handed in. Merges are left out. Exit code 1: a message breaks a rule.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

MAX_SUBJECT_CHARACTERS = 72
_TOPIC = re.compile(r"[a-z.][\w .,/-]*: \S")


def main(arguments: list[str] | None = None) -> int:
    """Print each fault as commit: reason. Return 1 if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("new", nargs="?", default="HEAD")
    given = parser.parse_args(arguments)
    found = [
        f"{commit}: {fault}"
        for commit, message in messages(given.base, given.new)
        for fault in faults_of(message)
    ]
    print("\n".join(found) or "all messages keep the rules")
    return 1 if found else 0


def messages(base: str, new: str) -> list[tuple[str, str]]:
    """Return (short hash, message) of the commits after ``base``, without merges."""
    listed = subprocess.run(
        ["git", "log", "--no-merges", "-z", "--format=%h %B", f"{base}..{new}"],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    parts = (one.partition(" ") for one in listed.split("\0") if one.strip())
    return [(commit, message) for commit, _, message in parts]


def faults_of(message: str) -> list[str]:
    """Return the faults of one commit's message."""
    subject, _, body = message.strip().partition("\n")
    found = []
    if len(subject) > MAX_SUBJECT_CHARACTERS:
        found.append(f"the subject has {len(subject)} characters, and {MAX_SUBJECT_CHARACTERS} is the limit")
    if not _TOPIC.match(subject):
        found.append('the subject does not begin with its room, such as "engine: "')
    if ";" in subject:
        found.append("the subject joins topics: make a commit of each")
    if not body.strip():
        found.append("no body says why")
    elif body.partition("\n")[0].strip():
        found.append("no empty line parts the subject from the body")
    return found


if __name__ == "__main__":
    sys.exit(main())
