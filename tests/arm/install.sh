#!/bin/sh
# A cross compiler for 64-bit ARM and qemu's user mode, from Debian or Ubuntu unless they are there. Exit 3 with a
# reason if they cannot be had.
set -u
case "$(uname -s)-$(uname -m)" in
  Linux-x86_64) ;;
  *) echo "test-arm: skipped: it compares x86-64 with ARM, and this is $(uname -s) on $(uname -m)" >&2; exit 3 ;;
esac
missing=
for tool in cc aarch64-linux-gnu-gcc qemu-aarch64; do
  command -v "$tool" >/dev/null 2>&1 || missing="$missing $tool"
done
[ -f /usr/aarch64-linux-gnu/lib/libc.a ] || missing="$missing libc.a"
[ -z "$missing" ] && exit 0
exec sh "$(dirname "$0")/../support/apt_install.sh" test-arm "$missing" \
  --no-install-recommends gcc libc6-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
