#!/bin/sh
# The software TPM and the tools: from Debian or Ubuntu, unless they are there. Exit 3 with a reason if they cannot be had.
set -u
missing=
for tool in swtpm swtpm_setup swtpm_localca tpm2_quote; do
  command -v "$tool" >/dev/null 2>&1 || missing="$missing $tool"
done
[ -z "$missing" ] && exit 0
exec sh "$(dirname "$0")/../support/apt_install.sh" test-tpm "$missing" swtpm swtpm-tools tpm2-tools
