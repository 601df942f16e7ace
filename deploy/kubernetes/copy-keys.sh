#!/bin/sh
# copy-keys.sh NAME: copy the keys of the member NAME from /secret to the memory volume /keys, and write its convoy.toml.
# Convoy refuses keys that others may read, and a Secret's files belong to root.
set -eu
umask 077
name=$1
mkdir -p /keys/identity
for file in identity.key tls.key tls.crt; do
  cp "/secret/$name.$file" "/keys/identity/$file"
done
if [ -e /secret/api.keys ]; then cp /secret/api.keys /keys/api.keys; fi
cp /cluster/roster.toml /keys/roster.toml
cat >/keys/convoy.toml <<EOF
[cluster]
name = "$name"
identity = "identity"
roster = "roster.toml"
operator_key = "$(cat /cluster/operator-key.txt)"
EOF
