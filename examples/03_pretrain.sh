#!/usr/bin/env bash
# Pretrain a block diffusion language model with context-sharded block parallelism: one machine, or one node of a Slurm job.
#
#     bash examples/03_pretrain.sh                                  # mock data, a toy model, every GPU of this machine
#     DEVICE=cpu NPROC=2 TRAIN_ITERS=10 bash examples/03_pretrain.sh
#     MODEL=qwen3-8b SEQ_LENGTH=262144 CP=8 MOCK=0 DATA_PATH=data/corpus TOKENIZER=data/tokenizer bash examples/03_pretrain.sh
#     sbatch examples/slurm/qwen3_8b_256k_2x8.sbatch                # starts this script on every node
#
#   MODEL               toy or qwen3-8b (default: toy)
#   SEQ_LENGTH          clean tokens of a sample      BLOCK_SIZE   tokens of a block (32)
#   TP PP CP BP         parallel sizes (1, 1, all processes, CP); what is left of the world is data parallel
#   GLOBAL_BATCH_SIZE   samples of a step             TRAIN_ITERS  steps of the whole run; a later launch goes on
#   MOCK                1: mock data (default); 0: DATA_PATH (a prefix of tools/preprocess_data.py) and TOKENIZER (its folder)
#   PRETRAINED          checkpoint of tools/convert_checkpoint.py to-bdlm to start from; its options are taken
#   RUN_DIR             checkpoints, TensorBoard, log (default: runs/pretrain-MODEL)
#   DEVICE              gpu (default) or cpu          NPROC        processes of this node (default: its GPUs; cpu: 2)
#   BDLM_VENV, BDLM_PYTHON, BDLM_PIP_ARGS   see examples/environment.sh
#
# Placement: ranks of a context-parallel group are neighbours (with TP between them), so with TP x CP <= GPUs of a node no key or value
# leaves a node; where a group spans nodes, --bdlm-transport auto sends each row over the network once. `tools/plan_run.py` predicts both.
#
# SIGUSR2 (EXIT_SIGNAL) to the training processes saves a checkpoint and ends the run with exit code 0.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
MODEL=${MODEL:-toy}
DEVICE=${DEVICE:-gpu}
MOCK=${MOCK:-1}
RUN_DIR=${RUN_DIR:-runs/pretrain-$MODEL}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}

# shellcheck source=examples/environment.sh
source examples/environment.sh

case $DEVICE in
    gpu) NPROC=${NPROC:-$("$BDLM_PYTHON" -c 'import torch; print(torch.cuda.device_count())')} ;;
    cpu) NPROC=${NPROC:-2} && export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} ;;
    *) echo "error: DEVICE=$DEVICE: a legal value: gpu or cpu" >&2 && exit 2 ;;
esac
if ((NPROC < 1)); then
    echo "error: no GPU is visible. A legal value: DEVICE=cpu" >&2
    exit 2
fi

case $MODEL in
    toy)
        MODEL_ARGS=(
            --num-layers 4
            --hidden-size 128
            --ffn-hidden-size 384
            --num-attention-heads 4
            --group-query-attention
            --num-query-groups 2
            --qk-layernorm
        )
        SEQ_LENGTH=${SEQ_LENGTH:-512}
        ;;
    qwen3-8b)
        MODEL_ARGS=(
            --num-layers 36
            --hidden-size 4096
            --ffn-hidden-size 12288
            --num-attention-heads 32
            --kv-channels 128
            --group-query-attention
            --num-query-groups 8
            --qk-layernorm
            --rotary-base 1000000
            --norm-epsilon 1e-6
            --untie-embeddings-and-output-weights
        )
        SEQ_LENGTH=${SEQ_LENGTH:-131072}
        ;;
    *) echo "error: MODEL=$MODEL: a legal value: toy or qwen3-8b" >&2 && exit 2 ;;
esac
MODEL_ARGS+=(
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
)

DISTRIBUTED_ARGS=(
    --nproc-per-node "$NPROC"
    --nnodes "$NNODES"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)

TP=${TP:-1}
PP=${PP:-1}
CP=${CP:-$((NPROC * NNODES / TP / PP))}
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --block-parallel-size "${BP:-$CP}"
    --use-distributed-optimizer
    --dist-ckpt-optim-fully-reshardable # a later launch may have other sizes
)
((TP == 1)) || MODEL_PARALLEL_ARGS+=(--sequence-parallel)

BDLM_ARGS=(
    --bdlm-recipe "${RECIPE:-bd3lm}"
    --bdlm-block-size "${BLOCK_SIZE:-32}"
    --bdlm-transport auto
)

TRAIN_ITERS=${TRAIN_ITERS:-100}
TRAINING_ARGS=(
    --train-iters "$TRAIN_ITERS"
    --micro-batch-size 1
    --global-batch-size "${GLOBAL_BATCH_SIZE:-16}"
    --lr "${LR:-3e-4}"
    --min-lr "${MIN_LR:-3e-5}"
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --seed 1234
    --exit-signal-handler
    --exit-signal "${EXIT_SIGNAL:-SIGUSR2}"
)
if [[ $DEVICE == gpu ]]; then
    TRAINING_ARGS+=(--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
fi
if [[ -n ${PRETRAINED:-} ]]; then
    TRAINING_ARGS+=(--pretrained-checkpoint "$PRETRAINED" --use-checkpoint-args)
fi

if [[ $MOCK == 1 ]]; then
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 1023)
else
    DATA_ARGS=(
        --data-path "${DATA_PATH:?MOCK=0 needs DATA_PATH, a prefix that tools/preprocess_data.py wrote}"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER:?MOCK=0 needs TOKENIZER, the folder of the tokenizer}"
        --split "${SPLIT:-98,2,0}"
        --data-cache-path "$RUN_DIR/data-cache"
    )
fi
DATA_ARGS+=(--num-workers "${NUM_WORKERS:-1}")

EVAL_AND_LOGGING_ARGS=(
    --log-interval "${LOG_INTERVAL:-10}"
    --eval-interval "${EVAL_INTERVAL:-100}"
    --eval-iters "${EVAL_ITERS:-4}"
    --save "$RUN_DIR/checkpoints"
    --load "$RUN_DIR/checkpoints" # the newest complete checkpoint, or a fresh start
    --save-interval "${SAVE_INTERVAL:-100}"
    --ckpt-format torch_dist
    --tensorboard-dir "$RUN_DIR/tensorboard"
)

mkdir -p -- "$RUN_DIR"
if ((NODE_RANK == 0)); then
    git rev-parse HEAD >"$RUN_DIR/revision.txt" 2>/dev/null || true # the resolved options are written beside the checkpoints
fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false
trap '' USR2 # a job's signal reaches torchrun too, which would die of it; the training processes take it
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_bdlm.py \
    "${MODEL_ARGS[@]}" "${BDLM_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" 2>&1 | tee -a "$RUN_DIR/train.$NODE_RANK.log"
