#!/usr/bin/env bash
# Step 3: pretrain with context-sharded block parallelism, on one machine or as one node of a Slurm job.
#
#     bash examples/03_pretrain.sh                                         # mock data, a toy model, every GPU of this machine
#     DEVICE=cpu NPROC=2 TRAIN_ITERS=10 bash examples/03_pretrain.sh
#     MOCK=0 MODEL=qwen3-8b SEQ_LENGTH=262144 CP=8 bash examples/03_pretrain.sh    # the text of step 1, random weights
#     MOCK=0 PRETRAINED=runs/convert/block-diffusion bash examples/03_pretrain.sh  # .., from the model of step 2
#     sbatch examples/slurm/qwen3_8b_256k_2x8.sbatch                       # starts this script on every node
#
#   DATA_PATH           with MOCK=0: a prefix of tools/preprocess_data.py (default: DATA_DIR/train), read with TOKENIZER
#   RECIPE              a published objective (bd3lm); recipes/NAME.sh writes its flags out. BLOCK_SIZE: tokens of a block (the recipe's)
#   GLOBAL_BATCH_SIZE   samples of a step (16)        TRAIN_ITERS   steps of the whole run (100); a later launch goes on
#   LR, MIN_LR          peak and last learning rate (3e-4, 0)
#   RUN_DIR             checkpoints, TensorBoard, logs (default: RUNS/pretrain-MODEL)
#   MODEL, PRETRAINED, SEQ_LENGTH, TP, PP, CP, BP, NPROC ..   see examples/training.sh
#   RUNS, MOCK, DEVICE, BDLM_PYTHON ..                        see examples/common.sh
# Arguments are further flags of pretrain_bdlm.py and win over those below.
#
# SIGUSR2 (EXIT_SIGNAL) to the training processes saves a checkpoint and ends the run with exit code 0.
set -euo pipefail

# shellcheck source=examples/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=examples/training.sh
source examples/training.sh
RUN_DIR=${RUN_DIR:-$RUNS/pretrain-$MODEL}

if [[ -z ${BDLM_ARGS+set} ]]; then # a script of recipes/ has set them
    BDLM_ARGS=(--bdlm-recipe "${RECIPE:-bd3lm}")
    [[ -z ${BLOCK_SIZE:-} ]] || BDLM_ARGS+=(--bdlm-block-size "$BLOCK_SIZE")
fi

TRAINING_ARGS=(
    --train-iters "${TRAIN_ITERS:-100}"
    --micro-batch-size 1
    --global-batch-size "${GLOBAL_BATCH_SIZE:-16}"
    --lr "${LR:-3e-4}"
    --min-lr "${MIN_LR:-0}"
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
    --override-opt_param-scheduler # with more TRAIN_ITERS than before, a launch goes on under the longer schedule
    --clip-grad 1.0
    --seed 1234
    --exit-signal-handler
    --exit-signal "${EXIT_SIGNAL:-SIGUSR2}"
)
if [[ $DEVICE == gpu ]]; then
    TRAINING_ARGS+=(--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
fi

if [[ $MOCK == 1 ]]; then
    [[ -z ${PRETRAINED:-} ]] || fail "PRETRAINED=$PRETRAINED with MOCK=1: mock data are ids of another vocabulary. A legal value: MOCK=0"
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 1023)
else
    DATA_PATH=${DATA_PATH:-$DATA_DIR/train}
    need "$DATA_PATH.idx" "MOCK=0 needs DATA_PATH, a prefix that tools/preprocess_data.py wrote (01_prepare_data.sh)"
    need "$TOKENIZER" "MOCK=0 needs TOKENIZER, the folder of the tokenizer (01_prepare_data.sh)"
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "$TOKENIZER"
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

train pretrain_bdlm.py "${MODEL_ARGS[@]}" "${BDLM_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" "$@"
