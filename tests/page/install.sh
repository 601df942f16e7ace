#!/bin/sh
# Chromium from Debian or Ubuntu unless it is there. Exit 3 with a reason if it cannot be had.
set -u
command -v chromium >/dev/null 2>&1 && exit 0
exec sh "$(dirname "$0")/../support/apt_install.sh" test-page " chromium" \
  --no-install-recommends chromium fonts-dejavu-core
