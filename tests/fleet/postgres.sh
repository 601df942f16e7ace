#!/bin/sh
# Run a command with --postgres URL of a PostgreSQL that is made for it and ends with it: Debian's or Ubuntu's, installed where
# it is missing. It listens on no port, only in a folder of its own. Exit 3 with a reason if it cannot be had.
set -u
find_tool() { command -v "$1" 2>/dev/null || ls /usr/lib/postgresql/*/bin/"$1" 2>/dev/null | tail -n 1; }
if [ -z "$(find_tool initdb)" ]; then
  sh "$(dirname "$0")/../support/apt_install.sh" test-postgres " postgresql" postgresql || exit 3
fi
initdb=$(find_tool initdb)
control=$(find_tool pg_ctl)
folder=$(mktemp -d)
as() { "$@"; }
if [ "$(id -u)" -eq 0 ]; then # it refuses to run as root
  chown postgres "$folder"
  as() { runuser -u postgres -- "$@"; }
fi
trap 'as "$control" -D "$folder/data" -m immediate stop >/dev/null 2>&1; rm -rf "$folder"' EXIT
as "$initdb" -D "$folder/data" -A trust -U convoy >"$folder.log" 2>&1 &&
  as "$control" -D "$folder/data" -o "-k $folder -c listen_addresses='' -c fsync=off" -l "$folder/log" -w start >>"$folder.log" 2>&1 || {
  tail -n 5 "$folder.log" >&2
  echo "error: PostgreSQL does not start" >&2
  exit 1
}
rm -f "$folder.log"
"$@" --postgres "postgresql://convoy@/postgres?host=$folder"
