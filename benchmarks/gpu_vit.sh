#!/usr/bin/env bash
# Measures the grid of gpu_vit.py, a process a point, and keeps its lines in a file:
#   benchmarks/gpu_vit.sh results.jsonl base           # or desktop
#   PLATFORM=cpu benchmarks/gpu_vit.sh results.jsonl tiny   # tries it without a GPU
# Points that the file holds are not measured again, unless they failed or ended their process.
set -euo pipefail
vit=$(dirname "$0")/gpu_vit.py
points=$(JAX_PLATFORMS=cpu python "$vit" --list --out="$1" --only "$2")
printf '%s\n' "$points" | sed -n 's/^missing\t//p' | while IFS=$'\t' read -r -a point; do
  python "$vit" --out="$1" --only "${point[@]}" < /dev/null && continue || status=$?
  ((status != 2)) || exit 2  # there is no GPU
  echo "${point[*]}: the process ended with status $status" >&2
done
