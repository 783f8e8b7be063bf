#!/usr/bin/env bash
# Checkpoint folders in, ready bundle out, with TensorRT plans if build options follow a `--`:
#   scripts/build_engines.sh TRUNK DRAFT BUNDLE [export options] [-- build options]
#   scripts/build_engines.sh trunk draft bundle --dtype bf16 -- --backend tensorrt
set -euo pipefail

if [ $# -lt 3 ]; then
  echo "usage: $0 TRUNK DRAFT BUNDLE [options of eagle-chain export]" \
    "[-- options of eagle-chain build]" >&2
  exit 2
fi
trunk=$1 draft=$2 bundle=$3
shift 3
python=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python
[ -x "$python" ] || python=python3

export=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  export+=("$1")
  shift
done

# Bash takes no signal before the command that it runs has ended, but `wait` lets it. Ctrl-C reaches
# the command as well, which then cleans up; so does SIGTERM, once it is passed on.
step() {
  (trap - INT; exec "$python" -m "$@") &
  child=$!
  wait "$child"
}
ended() { wait "$child" || exit $?; exit "$1"; }
child=
trap 'ended 130' INT
trap 'kill $child 2> /dev/null || true; ended 143' TERM

step eagle_chain.export "$trunk" "$draft" -o "$bundle" "${export[@]}"
if [ $# -gt 0 ]; then
  step eagle_chain.engines build "$bundle" "${@:2}"
fi
step eagle_chain.engines inspect "$bundle"
