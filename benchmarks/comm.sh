#!/bin/sh
# Collectives of Trireme and of Gloo, interleaved in one run: benchmarks/comm.sh [ROUNDS] [RANKS]
# The build is taken from BUILD (build/release), the Python with torch from PYTHON (.venv/bin/python).
set -eu
cd "$(dirname "$0")/.."
rounds=${1:-3}
ranks=${2:-2}
results=$(mktemp)
trap 'rm -f "$results"' EXIT
for round in $(seq "$rounds"); do
  "${BUILD:-build/release}/benchmarks/comm_bench" --ranks "$ranks" --repetitions 5 --json >>"$results"
  PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 "${PYTHON:-.venv/bin/python}" benchmarks/comm_gloo_bench.py --ranks "$ranks" --repetitions 5 >>"$results"
done
"${PYTHON:-.venv/bin/python}" benchmarks/comm_table.py <"$results"
