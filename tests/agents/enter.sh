#!/bin/sh
# Run a command in a network namespace with loopback alone, as `sh enter.sh COMMAND...`. Names are asked of 127.0.0.1. The
# command gets --agents-place FOLDER: a file system of its own that any user may enter, with the agents in FOLDER/programs.
# The namespaces and all that is in them end with the command.
set -eu
umask 022
place=$(mktemp -d /tmp/convoy-agents.XXXXXX)
trap 'rmdir "$place"' EXIT
unshare --net --mount sh -c '
  set -eu
  place=$1
  shift
  ip link set lo up
  mount -t tmpfs -o mode=755 agents "$place"
  mkdir "$place/programs"
  mount --bind .agents "$place/programs"
  echo "nameserver 127.0.0.1" > "$place/resolv.conf"
  mount --bind "$place/resolv.conf" "$(readlink -f /etc/resolv.conf)"
  exec "$@" --agents-place "$place"' sh "$place" "$@"
