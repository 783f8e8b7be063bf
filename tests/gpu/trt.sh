#!/usr/bin/env bash
# TensorRT on a GPU, from checkpoints to timings: OUT/results.json and what each stage prints.
#
#   tests/gpu/trt.sh prepare OUT            bundles of the demo pair and of a four-layer 9B slice, and
#                                           recordings of what PyTorch gives for them ($TORCH, python3)
#   tests/gpu/trt.sh run OUT [options of trt_series.py]            in the Python that has TensorRT
#                                           ($PYTHON, default python3), with its own environment
#
# PREFILL=64 exports engines for prompts as well, which take TensorRT longer to build than the rest.
# Both need numpy, onnx, onnx-ir, Polygraphy and rich; EXTRA may name a folder that has what a Python lacks.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
verb=${1:?prepare or run} out=$(realpath -m "${2:?a folder}")
shift 2

source "$root/tests/gpu/path.sh"
path=$out/path:$root${EXTRA:+:$EXTRA}

if [ "$verb" = prepare ]; then
  torch() { PYTHONPATH=$path "${TORCH:-python3}" "$@"; }
  [ -d "$out/slice/trunk" ] || torch "$root/tests/gpu/trt_pair.py" "$out/slice"
  for dtype in fp32 fp16; do
    for pair in demo slice; do
      [ "$pair-$dtype" = slice-fp32 ] && continue
      folder=$out/slice aux=(--aux-layers 0,1,3)
      [ "$pair" = demo ] && folder=$root/demo aux=()
      bundle=$out/$pair-$dtype
      torch -m eagle_chain.engines export "$folder/trunk" "$folder/draft" -o "$bundle" \
        --dtype "$dtype" --capacity 128 --debug logits --prefill "${PREFILL:-0}" --no-mtp "${aux[@]}"
      [ -d "$out/$pair-recording" ] ||
        torch -m eagle_chain.engines record "$bundle" -o "$out/$pair-recording" --part
    done
  done
else
  cd "$root"
  bundles=()
  for name in demo-fp32 demo-fp16 slice-fp16; do
    [ -d "$out/$name" ] && bundles+=(--bundle "$name=$out/$name,$out/${name%-*}-recording")
  done
  PYTHONPATH=$path:${PYTHONPATH:-} "${PYTHON:-python3}" tests/gpu/trt_series.py "$out" "${bundles[@]}" "$@"
fi
