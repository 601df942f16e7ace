#!/bin/sh
# apt_install.sh TARGET MISSING ARGUMENT...: apt-get install these packages for `make TARGET`. Exit 3 with a reason and
# the MISSING tools if they cannot be had.
set -u
target=$1 missing=$2
shift 2
skip() { echo "$target: skipped: $1$missing" >&2; exit 3; }
command -v apt-get >/dev/null 2>&1 || skip "no apt-get, and not installed:"
sudo=
if [ "$(id -u)" -ne 0 ]; then
  sudo="sudo -n"
  $sudo true 2>/dev/null || skip "not root, and not installed:"
fi
log=$(mktemp)
if $sudo apt-get update -qq >"$log" 2>&1 &&
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >>"$log" 2>&1; then
  rm -f "$log"
  exit 0
fi
tail -n 5 "$log" >&2
rm -f "$log"
skip "apt-get could not install"
