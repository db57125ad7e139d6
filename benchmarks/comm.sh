#!/bin/sh
# Collectives of Trireme and of Gloo, interleaved in one run; --help says how.
set -eu
case "${1:-}" in
  -h | --help)
    echo "comm.sh [ROUNDS] [RANKS]: collectives of Trireme and of Gloo, interleaved in one run (3 rounds, 2 ranks)."
    echo "BUILD=build/release names the build, PYTHON=.venv/bin/python the Python with torch."
    exit 0
    ;;
esac
for count in "$@"; do
  case "$count" in
    '' | *[!0-9]*)
      echo "comm.sh: $count: no number; comm.sh takes [ROUNDS] [RANKS] and --help" >&2
      exit 2
      ;;
  esac
done
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
