#!/usr/bin/env bash
# Run the shipped pair on this machine: installs what that needs into .venv (once), then the demo.
# Options go to `eagle-chain demo`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

prepare requirements-demo.txt
exec "$python" -m eagle_chain.engines demo "$@"
