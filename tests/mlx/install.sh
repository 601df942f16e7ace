#!/bin/sh
# Install MLX and mlx-lm for the Python $1. Exit 3 with a reason where MLX has no wheel.
set -u
log=$(mktemp)
if "$1" -m pip install -q --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
  -r requirements-mlx.lock -r tests/mlx/mlx-lm.lock >"$log" 2>&1; then
  rm -f "$log"
  exit 0
fi
tail -n 5 "$log" >&2
rm -f "$log"
echo "test-mlx: skipped: pip could not install MLX on $(uname -s) $(uname -m)" >&2
exit 3
