#!/usr/bin/env bash
# Measures the grid of gpu_vit.py, one process a point, and appends its lines to a file:
#   benchmarks/gpu_vit.sh results.jsonl base
#   benchmarks/gpu_vit.sh results.jsonl desktop --batch=32 --batch=64
#   PLATFORM=cpu benchmarks/gpu_vit.sh results.jsonl tiny   # tries it without a GPU
# Points that the file holds are not measured again, unless they failed.
set -euo pipefail
out=$1 model=$2
shift 2
vit="$(dirname "$0")/gpu_vit.py"
# A step is compiled for its time, and found here for its memory.
JAX_COMPILATION_CACHE_DIR=$(mktemp -d)
trap 'rm -rf "$JAX_COMPILATION_CACHE_DIR"' EXIT
export JAX_COMPILATION_CACHE_DIR
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
points=$(python "$vit" --model="$model" --missing="$out" "$@")
# xargs would stop after a process that a signal ends: such a point is a line, too.
measure='python "$0" "$@" && exit; status=$?
((status < 128 || status == 255)) && exit "$status"
python "$0" "$@" --died="$status"'
printf '%s' "$points" | xargs -r -L1 bash -c "$measure" "$vit" --platform="${PLATFORM:-gpu}" |
  python -m tqdm --unit=point --total="$(printf '%s' "$points" | grep -c .)" >> "$out"
