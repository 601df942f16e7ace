#!/bin/sh
# Install the AI SDK beside this script, as the lock has it. Exit 3 with a reason if it cannot be had.
set -u
cd "$(dirname "$0")" || exit 1
for tool in node npm; do
  command -v "$tool" >/dev/null 2>&1 || { echo "test-sdk: skipped: no $tool" >&2; exit 3; }
done
major=$(node -p 'process.versions.node.split(".")[0]')
[ "$major" -ge 20 ] || { echo "test-sdk: skipped: Node 20 or later is needed, and this is $major" >&2; exit 3; }
# npm writes its own copy of the lock when all packages are in place.
stamp=node_modules/.package-lock.json
[ -f "$stamp" ] && [ ! package-lock.json -nt "$stamp" ] && exit 0
log=$(mktemp)
# No package runs a script of its own.
if npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >"$log" 2>&1; then
  touch "$stamp"
  rm -f "$log"
  exit 0
fi
tail -n 5 "$log" >&2
rm -f "$log"
echo "test-sdk: skipped: npm could not install the packages" >&2
exit 3
