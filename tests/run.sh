#!/usr/bin/env bash
# Runs every test; makes the environment first if needed.
#
#     bash tests/run.sh                    everything that this machine can run, but for long variants of other tests
#     bash tests/run.sh --all              those too (6 minutes more)
#     bash tests/run.sh tests/attention    a part
#     bash tests/run.sh -m gpu             what needs a CUDA device
#     bash tests/run.sh -m 'not slow and not long'      seconds-long tests only
#
# All arguments go to pytest; its exit code is returned. Two tests run at a time (half the cores' number on larger
# machines): many start 2 or 4 processes themselves, and wait for each other. BDLM_TEST_WORKERS=0: one at a time.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd -- "$root"
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh"

# One thread a process: ranks share the cores, and sums keep their order from run to run.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg

cores=$(getconf _NPROCESSORS_ONLN)
workers=${BDLM_TEST_WORKERS:-$((cores > 4 ? cores / 2 : 2))}

selection=(-m "not long")
if [[ ${1:-} == --all ]]; then
    selection=()
    shift
fi

exec "$BDLM_PYTHON" -m pytest "${selection[@]}" --numprocesses="$workers" --dist=loadfile --durations=15 --durations-min=5 "$@"
