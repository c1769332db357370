#!/usr/bin/env bash
# Step 4: fine-tune on conversations; only what the assistant says is supervised.
#
#     PRETRAINED=runs/pretrain-toy/checkpoints bash examples/04_finetune.sh      # questions about Python's built-in functions
#     MOCK=0 CONVERSATIONS=chat.jsonl MODEL=qwen3-8b PRETRAINED=.. SEQ_LENGTH=32768 bash examples/04_finetune.sh
#
#   CONVERSATIONS       with MOCK=0: JSON lines with "messages", or "prompt" and "completion" (docs/data.md)
#   RECIPE              a published objective (bd3lm); recipes/NAME.sh writes its flags out. BLOCK_SIZE: tokens of a block (the recipe's)
#   GLOBAL_BATCH_SIZE   packed samples of a step (8)  TRAIN_ITERS   steps of the whole run (100); a later launch goes on
#   LR, MIN_LR          peak and last learning rate (1e-5, 0)
#   RUN_DIR             checkpoints, TensorBoard, logs (default: RUNS/finetune)
#   MODEL, PRETRAINED, SEQ_LENGTH, TP, PP, CP, BP, NPROC ..   see examples/training.sh; without PRETRAINED: random weights
#   RUNS, MOCK, DEVICE, TOKENIZER, BDLM_PYTHON ..             see examples/common.sh
# Arguments are further flags of finetune_bdlm.py and win over those below.
set -euo pipefail

# shellcheck source=examples/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=examples/training.sh
source examples/training.sh
RUN_DIR=${RUN_DIR:-$RUNS/finetune}
need "$TOKENIZER" "TOKENIZER names the folder of the tokenizer (01_prepare_data.sh)"

if [[ $MOCK == 1 ]]; then
    CONVERSATIONS=$RUN_DIR/conversations.jsonl
    mkdir -p -- "$RUN_DIR"
    [[ -f $CONVERSATIONS ]] || python - >"$CONVERSATIONS" <<'PYTHON'
import builtins, json
for name, value in sorted(vars(builtins).items()):
    if type(value) is type(len) and value.__doc__:
        print(json.dumps({"prompt": f"What does {name} do?\n", "completion": value.__doc__.splitlines()[0]}))
PYTHON
fi
need "${CONVERSATIONS:?MOCK=0 needs CONVERSATIONS: JSON lines}" "CONVERSATIONS names JSON lines (docs/data.md)"

if [[ -z ${BDLM_ARGS+set} ]]; then # a script of recipes/ has set them
    BDLM_ARGS=(--bdlm-recipe "${RECIPE:-bd3lm}")
    [[ -z ${BLOCK_SIZE:-} ]] || BDLM_ARGS+=(--bdlm-block-size "$BLOCK_SIZE")
fi

TRAINING_ARGS=(
    --train-iters "${TRAIN_ITERS:-100}"
    --micro-batch-size 1
    --global-batch-size "${GLOBAL_BATCH_SIZE:-8}"
    --lr "${LR:-1e-5}"
    --min-lr "${MIN_LR:-0}"
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.0
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

DATA_ARGS=(
    --data-path "$CONVERSATIONS"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER"
    --split "${SPLIT:-90,10,0}"
    --bdlm-sft-packing first-fit
    --bdlm-sft-too-long drop # counted, and the first are named; or error, truncate-left
    --data-cache-path "$RUN_DIR/data-cache"
    --num-workers "${NUM_WORKERS:-1}"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval "${LOG_INTERVAL:-10}"
    --eval-interval "${EVAL_INTERVAL:-100}"
    --eval-iters "${EVAL_ITERS:-4}"
    --save "$RUN_DIR/checkpoints"
    --load "$RUN_DIR/checkpoints" # the newest complete checkpoint, or PRETRAINED
    --save-interval "${SAVE_INTERVAL:-100}"
    --ckpt-format torch_dist
    --tensorboard-dir "$RUN_DIR/tensorboard"
)

train finetune_bdlm.py "${MODEL_ARGS[@]}" "${BDLM_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" "$@"
