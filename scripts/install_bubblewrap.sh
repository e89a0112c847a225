#!/usr/bin/env bash
# Installs bubblewrap, in which programs of models run (SECURITY.md), unless it is there. Needs root, or sudo without a
# password.
set -euo pipefail
command -v bwrap >/dev/null && exit 0
as_root=()
if ((EUID != 0)); then
  sudo -n true 2>/dev/null || {
    echo "install_bubblewrap.sh: needs root; ask for: apt-get install bubblewrap, or dnf install bubblewrap" >&2
    exit 1
  }
  as_root=(sudo -n)
fi
if command -v apt-get >/dev/null; then
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends bubblewrap
elif command -v dnf >/dev/null; then
  "${as_root[@]}" dnf install -q -y bubblewrap
else
  echo "install_bubblewrap.sh: neither apt-get nor dnf is here; install the package bubblewrap" >&2
  exit 1
fi
bwrap --version
