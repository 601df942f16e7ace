#!/bin/sh
# The software TPM and the tools: from Debian or Ubuntu, unless they are there. Exit 3 with a reason if they cannot be had.
set -u
missing=
for tool in swtpm swtpm_setup swtpm_localca tpm2_quote; do
  command -v "$tool" >/dev/null 2>&1 || missing="$missing $tool"
done
[ -z "$missing" ] && exit 0
command -v apt-get >/dev/null 2>&1 || { echo "test-tpm: skipped: no apt-get, and not installed:$missing" >&2; exit 3; }
sudo=
if [ "$(id -u)" -ne 0 ]; then
  sudo="sudo -n"
  $sudo true 2>/dev/null || { echo "test-tpm: skipped: not root, and not installed:$missing" >&2; exit 3; }
fi
log=$(mktemp)
if $sudo apt-get update -qq >"$log" 2>&1 &&
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq swtpm swtpm-tools tpm2-tools >>"$log" 2>&1; then
  rm -f "$log"
  exit 0
fi
tail -n 5 "$log" >&2
rm -f "$log"
echo "test-tpm: skipped: apt-get could not install$missing" >&2
exit 3
