#!/bin/sh
# Install MLX for the Python $1, and mlx-lm in the folder $2. Exit 3 with a reason where MLX has no wheel.
set -u
python=$1
log=$(mktemp)
install() {
  "$python" -m pip install -q --disable-pip-version-check --no-deps --only-binary :all: --require-hashes "$@" >>"$log" 2>&1
}
# mlx-lm gets a folder of its own: it lacks what it would need to serve, and `pip check` of the set-up would say so.
if install -r requirements-mlx.lock && install --upgrade --target "$2" -r tests/mlx/mlx-lm.lock; then
  rm -f "$log"
  exit 0
fi
tail -n 5 "$log" >&2
rm -f "$log"
echo "test-mlx: skipped: pip could not install MLX on $(uname -s) $(uname -m)" >&2
exit 3
