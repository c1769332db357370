#!/usr/bin/env bash
# Every way to share a sample's attention, on the GPUs of this machine over NCCL (context_strategies.py).
#
#     bash benchmarks/multi_gpu.sh                             all GPUs here, 256K tokens, heads of Qwen3-8B
#     LENGTH=1048576 BLOCK_SIZE=256 bash benchmarks/multi_gpu.sh
#     DEVICE=cpu bash benchmarks/multi_gpu.sh                  toy size over gloo: that the command runs
#
# Several machines: the same command on each, with NNODES, NODE_RANK and MASTER_ADDR set. Further arguments go to
# context_strategies.py. Results: RESULT.json and RESULT.png (default benchmarks/results/multi_gpu).
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=examples/environment.sh
source examples/environment.sh

DEVICE=${DEVICE:-cuda}
case $DEVICE in
    cuda)
        NPROC=${NPROC:-$("$BDLM_PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
        SHAPE=(
            --length "${LENGTH:-262144}"
            --block-size "${BLOCK_SIZE:-32}"
            --query-heads 32
            --key-heads 8
            --head-size 128
        )
        ;;
    cpu)
        NPROC=${NPROC:-2}
        SHAPE=(
            --length "${LENGTH:-256}"
            --block-size "${BLOCK_SIZE:-8}"
            --query-heads 4
            --key-heads 2
            --head-size 16
            --repeats 1
        )
        ;;
    *) echo "error: DEVICE=$DEVICE: a legal value: cuda or cpu" >&2 && exit 2 ;;
esac
if ((NPROC < 2)); then
    echo "error: NPROC=$NPROC: sharing needs at least 2 processes, a GPU each. A legal value: DEVICE=cpu NPROC=2" >&2
    exit 2
fi
RESULT=${RESULT:-benchmarks/results/multi_gpu}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$BDLM_PYTHON" -m torch.distributed.run \
    --nproc-per-node "$NPROC" \
    --nnodes "${NNODES:-1}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" \
    --master-port "${MASTER_PORT:-29500}" \
    benchmarks/context_strategies.py \
    --device "$DEVICE" \
    "${SHAPE[@]}" \
    --json "$RESULT.json" \
    --plot "$RESULT.png" \
    "$@"
