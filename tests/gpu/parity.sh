#!/usr/bin/env bash
# Parity of the shipped pair on a GPU: OUT/PROFILE-DTYPE.json, and the verdicts on stdout.
#
#   tests/gpu/parity.sh prepare OUT             where PyTorch and Polygraphy are ($TORCH, python3):
#                                               bundles of every profile and dtype, and recordings
#   tests/gpu/parity.sh run OUT [BACKEND ...]   where the GPU is ($PYTHON, python3); Polygraphy too.
#                                               Without a backend: onnxruntime-cuda for all profiles,
#                                               TensorRT flavours for those of standard ONNX. ONLY=TEXT:
#                                               bundles with that in their name; LIMIT=540: seconds for
#                                               all, what does not fit is left out
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
verb=${1:?prepare or run} out=$(realpath -m "${2:?a folder}")
shift 2

source "$root/tests/gpu/path.sh"
chain() { PYTHONPATH=$out/path:$root:${PYTHONPATH:-} "$python" -m eagle_chain.engines "$@"; }

if [ "$verb" = prepare ]; then
  python=${TORCH:-python3}
  for profile in portable standard ort-fused ort-cuda; do
    for dtype in fp32 fp16 bf16; do
      [ "$profile-$dtype" = ort-cuda-fp32 ] && continue
      chain export "$root/demo/trunk" "$root/demo/draft" -o "$out/$profile-$dtype" --weights copy \
        --profile "$profile" --dtype "$dtype" --capacity 256 --prefill 64 --debug logits
    done
  done
  chain parity "$out/portable-fp32" --save "$out/recording"
  chain parity "$out/ort-cuda-bf16" --save "$out/recording-ort-cuda"
  exit
fi

python=${PYTHON:-python3} failed=0 limit=${LIMIT:-540}
one() {  # PROFILE-DTYPE BACKEND
  local recording=$out/recording begin=$SECONDS left=$((limit - SECONDS)) code=0
  [[ $1 = ort-cuda-* ]] && recording=$out/recording-ort-cuda
  [ "$left" -gt 5 ] || { echo "== $1 on $2: left out"; return; }
  PYTHONPATH=$out/path:$root:${PYTHONPATH:-} timeout "$left" "$python" -m eagle_chain.engines parity \
    "$out/$1" --backend "$2" --load "$recording" --json > "$out/$1-$2.json" || code=$? failed=1
  echo "== [${SECONDS}s] $1 on $2: exit code $code, $((SECONDS - begin)) s;" \
    "$(head -c 300 "$out/$1-$2.json" | grep -o '"passed".*"bundle"' || true)"
}
for bundle in "$out"/{ort-fused,ort-cuda,portable,standard}-{bf16,fp16,fp32}; do
  name=$(basename "$bundle")
  [[ -d $bundle && $name = *${ONLY:-}* ]] || continue
  backends=("$@")
  [ $# -gt 0 ] || backends=(onnxruntime-cuda)
  for backend in "${backends[@]}"; do
    if [[ $backend = tensorrt* ]]; then
      [[ $name = ort-* ]] && continue
      chain build "$bundle" --backend "$backend" || { failed=1; continue; }
    fi
    one "$name" "$backend"
  done
done
exit "$failed"
