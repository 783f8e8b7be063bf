#!/usr/bin/env bash
# Parity of the shipped pair on a GPU: OUT/PROFILE-DTYPE[-q8].json, and the verdicts on stdout.
#
#   tests/gpu/parity.sh prepare OUT             where PyTorch and Polygraphy are ($TORCH, python3):
#                                               bundles of every profile and dtype, some with quantised
#                                               KV (-q8), and recordings
#   tests/gpu/parity.sh run OUT [BACKEND ...]   where the GPU is ($PYTHON, python3); Polygraphy too.
#                                               Without a backend: onnxruntime-cuda for all profiles,
#                                               TensorRT flavours for those of standard ONNX. ONLY=TEXT:
#                                               bundles with that in their name; LIMIT=540: seconds for
#                                               all, what does not fit is left out
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
verb=${1:?prepare or run} out=$(realpath -m "${2:?a folder}")
shift 2

bundles=(  # in this order
  ort-fused-{bf16,fp16,fp32,bf16-q8}
  ort-cuda-{bf16,fp16,bf16-q8}
  portable-{bf16,fp16,fp32,bf16-q8,fp32-q8}
  standard-{bf16,fp16,fp32}
)
source "$root/tests/gpu/path.sh"
chain() { PYTHONPATH=$out/path:$root:${PYTHONPATH:-} "$python" -m eagle_chain.engines "$@"; }

recording() {  # of a bundle: ort-cuda keeps another log, and the reference has the same KV type
  local name=recording
  case $1 in ort-cuda-*) name+=-ort-cuda ;; esac
  case $1 in *-q8) name+=-q8 ;; esac
  echo "$out/$name"
}

if [ "$verb" = prepare ]; then
  python=${TORCH:-python3}
  for name in "${bundles[@]}"; do
    [[ $name =~ ^(.+)-(bf16|fp16|fp32)(-q8)?$ ]]
    kv=(${BASH_REMATCH[3]:+--kv q8_0/q5_1})
    chain export "$root/demo/trunk" "$root/demo/draft" -o "$out/$name" --weights copy \
      --profile "${BASH_REMATCH[1]}" --dtype "${BASH_REMATCH[2]}" "${kv[@]}" \
      --capacity 256 --prefill 64 --debug logits
  done
  for name in portable-fp32 ort-cuda-bf16 portable-fp32-q8 ort-cuda-bf16-q8; do
    chain parity "$out/$name" --save "$(recording "$name")"
  done
  exit
fi

python=${PYTHON:-python3} failed=0 limit=${LIMIT:-540}
one() {  # BUNDLE BACKEND
  local begin=$SECONDS left=$((limit - SECONDS)) code=0
  [ "$left" -gt 5 ] || { echo "== $1 on $2: left out"; return; }
  PYTHONPATH=$out/path:$root:${PYTHONPATH:-} timeout "$left" "$python" -m eagle_chain.engines parity \
    "$out/$1" --backend "$2" --load "$(recording "$1")" --json > "$out/$1-$2.json" || code=$? failed=1
  echo "== [${SECONDS}s] $1 on $2: exit code $code, $((SECONDS - begin)) s;" \
    "$(head -c 300 "$out/$1-$2.json" | grep -o '"passed".*"bundle"' || true)"
}
for name in "${bundles[@]}"; do
  [[ -d $out/$name && $name = *${ONLY:-}* ]] || continue
  backends=("$@")
  [ $# -gt 0 ] || backends=(onnxruntime-cuda)
  for backend in "${backends[@]}"; do
    if [[ $backend = tensorrt* ]]; then
      [[ $name = ort-* ]] && continue
      chain build "$out/$name" --backend "$backend" || { failed=1; continue; }
    fi
    one "$name" "$backend"
  done
done
exit "$failed"
