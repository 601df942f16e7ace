#!/bin/sh
# Install the agents of package-lock.json from npm into .agents, each file by the hash of the lock. No script of a package
# runs. Exit 3 with a reason if this machine cannot run them. A file with another hash is an error.
set -u
# Another user runs the agents.
umask 022
here=$(dirname "$0")
folder=.agents
skip() { echo "test-agents: skipped: $*" >&2; exit 3; }
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || skip "the agents are installed for Linux on x86-64 only"
[ "$(id -u)" -eq 0 ] || skip "not root, and only root may make a network namespace and change the user"
missing=
command -v unshare >/dev/null 2>&1 || missing="$missing util-linux"
command -v setpriv >/dev/null 2>&1 || missing="$missing util-linux"
command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
cmp -s "$here/package-lock.json" "$folder/installed" || command -v npm >/dev/null 2>&1 || missing="$missing npm"
if [ -n "$missing" ]; then
  # shellcheck disable=SC2086 # a list of packages
  sh "$here/../support/apt_install.sh" test-agents "$missing" --no-install-recommends $missing || exit 3
fi
unshare --net --mount mount -t tmpfs agents /tmp 2>/dev/null || skip "this machine permits no network and mount namespaces"
cmp -s "$here/package-lock.json" "$folder/installed" && exit 0
rm -rf "$folder"
mkdir "$folder"
cp "$here/package.json" "$here/package-lock.json" "$folder"
log=$(mktemp)
if ! (cd "$folder" && npm ci --ignore-scripts --no-audit --no-fund) >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  wrong=$(grep EINTEGRITY "$log")
  rm -f "$log"
  [ -z "$wrong" ] || { echo "error: npm has a package with another hash than the lock" >&2; exit 1; }
  skip "npm could not install the agents"
fi
rm -f "$log"
mkdir "$folder/bin"
modules=../node_modules
ln -s $modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex "$folder/bin/codex"
ln -s $modules/@anthropic-ai/claude-code-linux-x64/claude "$folder/bin/claude"
ln -s $modules/opencode-linux-x64-baseline/bin/opencode "$folder/bin/opencode"
ln -s $modules/@cline/cli-linux-x64/bin/cline "$folder/bin/cline"
cp "$here/package-lock.json" "$folder/installed"
