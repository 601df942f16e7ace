#!/bin/sh
# buildah and debootstrap from Debian or Ubuntu unless they are there. Exit 3 with a reason if they cannot be had.
set -u
command -v buildah >/dev/null 2>&1 && command -v debootstrap >/dev/null 2>&1 && exit 0
exec sh "$(dirname "$0")/../support/apt_install.sh" test-image " buildah and debootstrap" \
  --no-install-recommends buildah debootstrap
