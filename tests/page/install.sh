#!/bin/sh
# Chromium from Debian or Ubuntu unless it is there. Exit 3 with a reason if it cannot be had.
set -u
command -v chromium >/dev/null 2>&1 && exit 0
command -v apt-get >/dev/null 2>&1 || { echo "test-page: skipped: no apt-get, and not installed: chromium" >&2; exit 3; }
sudo=
if [ "$(id -u)" -ne 0 ]; then
  sudo="sudo -n"
  $sudo true 2>/dev/null || { echo "test-page: skipped: not root, and not installed: chromium" >&2; exit 3; }
fi
log=$(mktemp)
if $sudo apt-get update -qq >"$log" 2>&1 &&
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    chromium fonts-dejavu-core >>"$log" 2>&1; then
  rm -f "$log"
  exit 0
fi
tail -n 5 "$log" >&2
rm -f "$log"
echo "test-page: skipped: apt-get could not install chromium" >&2
exit 3
