# Sourced by the other scripts: `prepare REQUIREMENTS [FIRST]` fills .venv with pinned packages, once.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python

# FIRST is a package to install on its own before the rest (torch: by far the largest).
prepare() {
  local requirements=$1 first=${2:-} pins stamp
  pins=$(cd "$root" && (pwd && cat pyproject.toml requirements-*.txt) | sha256sum)
  for stamp in requirements-dev.txt "$requirements"; do  # the first holds all of the second
    if [ "$(cat "$root/.venv/$stamp.stamp" 2>/dev/null)" = "$pins" ] && "$python" -c pass; then
      return
    fi
  done
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    local base=${PYTHON:-python3} found
    found=$("$base" -c 'import sys; print("is %d.%d" % sys.version_info[:2])' 2>/dev/null) ||
      found="does not start"
    case $found in
      "is 3.11" | "is 3.12" | "is 3.13") ;;
      *)
        echo "$(basename "$0"): needs Python 3.11 to 3.13, but $base $found;" \
          "name another: PYTHON=python3.12 bash $0" >&2
        exit 2
        ;;
    esac
    "$base" -m venv --clear "$root/.venv"
  fi
  echo "installing $requirements into $root/.venv" >&2
  local pip=("$python" -m pip install --quiet --disable-pip-version-check)
  if [ -n "$first" ]; then "${pip[@]}" "$first" >&2; fi
  "${pip[@]}" -r "$root/$requirements" >&2
  "${pip[@]}" --no-deps --no-build-isolation -e "$root" >&2
  echo "$pins" >"$root/.venv/$requirements.stamp"
}
