#!/usr/bin/env bash
# Lint, type check and test: installs what that needs into .venv (once). Options go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

prepare requirements-dev.txt torch==2.13.0
cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .

# mypy cannot follow an editable install of mapped folders: give it a plain one.
site=build/typed
rm -rf "$site"
mkdir -p "$site/source"
cp -r pyproject.toml README.md engines export runtime "$site/source"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --target "$site" "$site/source"
MYPYPATH=$site "$python" -m mypy \
  -p eagle_chain.engines -p eagle_chain.export -p eagle_chain.runtime

"$python" -m pytest "$@"
