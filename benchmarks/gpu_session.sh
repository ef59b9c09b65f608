#!/usr/bin/env bash
# One call on a machine with a GPU: the gpu tests, the demo, and a suite of benchmarks (first compiled in parallel).
#   benchmarks/gpu_session.sh OUT SUITE CASES...
set -u
out=$1 suite=$2; shift 2
export PYTHONUNBUFFERED=1 PYTHONPATH=.:${PYTHONPATH:-} TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor}
for case in "$@"; do
  for dim in 64 128; do
    python3 -m "benchmarks.$suite" --case "$case" --dim "$dim" --compile-only >"$out/compile-$case-$dim.log" 2>&1 &
  done
done
wait
arguments=()
for case in "$@"; do arguments+=(--case "$case"); done
python3 -m "benchmarks.$suite" "${arguments[@]}" --out "$out/$suite.json" 2>&1 | grep '^{'
if [ "$suite" = flex ]; then
  TRITON_CACHE_DIR=$(mktemp -d) python3 -m benchmarks.flex --compile-time --out "$out/flex_compile.json" 2>&1 | grep '^{'
  python3 -m benchmarks.flex --sweep --out "$out/flex_sweep.json" 2>&1 | grep '^{'
fi
