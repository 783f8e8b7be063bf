#!/usr/bin/env bash
# Checkpoint folders in, ready bundle out: scripts/build_engines.sh TRUNK DRAFT BUNDLE [export options]
set -euo pipefail

if [ $# -lt 3 ]; then
  echo "usage: $0 TRUNK DRAFT BUNDLE [options of eagle-chain export]" >&2
  exit 2
fi
trunk=$1 draft=$2 bundle=$3
shift 3
python=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python
[ -x "$python" ] || python=python3

"$python" -m eagle_chain.export "$trunk" "$draft" -o "$bundle" "$@"
"$python" -m eagle_chain.engines inspect "$bundle"
