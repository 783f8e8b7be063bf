#!/usr/bin/env bash
# Lint, format, types and tests, each whatever the others say; fails if one of them does. Installs
# what that needs into .venv (once). Options go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

prepare requirements-dev.txt torch==2.13.0
cd "$root"

failed=0 results=
check() {  # NAME COMMAND...: a failure is noted, and the rest still runs
  local name=$1
  shift
  if "$@"; then
    results+="$name ok | "
  else
    results+="$name FAILED | "
    failed=1
  fi
}

# mypy cannot follow an editable install of mapped folders: give it a plain one.
types() {
  local site=build/typed
  rm -rf "$site" && mkdir -p "$site/source" &&
    cp -r pyproject.toml README.md engines export runtime "$site/source" &&
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
      --target "$site" "$site/source" &&
    MYPYPATH=$site "$python" -m mypy \
      -p eagle_chain.engines -p eagle_chain.export -p eagle_chain.runtime
}

check lint "$python" -m ruff check .
check format "$python" -m ruff format --check .
check types types
echo "${results}tests follow"
"$python" -m pytest -n auto --maxprocesses 4 --dist worksteal "$@" || failed=$?
exit "$failed"
