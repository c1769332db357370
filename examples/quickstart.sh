#!/usr/bin/env bash
# From nothing to a sampled continuation: corpus, tokenizer, training of a small block diffusion language model with
# context-sharded block parallelism on 2 processes, validation, checkpoint, resume, sampling, plot.
#
#     bash examples/quickstart.sh
#
# Any machine with 2 cores will do (5 to 8 minutes after the packages are there); GPUs are used where they are.
# Everything goes into runs/quickstart; what is already there is kept, so an interrupted run continues.
#
#   RUN_DIR       where everything goes (default: runs/quickstart)
#   NPROC         processes, which is also the context-parallel size (default: 2; with one GPU: 1)
#   TRAIN_ITERS   iterations in all (default: 300); the first launch stops at half of them
#   BDLM_VENV, BDLM_PYTHON, BDLM_PIP_ARGS   see examples/environment.sh
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
RUN_DIR=${RUN_DIR:-runs/quickstart}
TRAIN_ITERS=${TRAIN_ITERS:-300}
CORPUS_MB=${CORPUS_MB:-4}
VOCAB_SIZE=${VOCAB_SIZE:-1024}

stage() { printf '\n=== [%2d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

stage "1/8 environment"
# shellcheck source=examples/environment.sh
source examples/environment.sh
PACKAGES_READY=$SECONDS

GPUS=$("$BDLM_PYTHON" -c 'import torch; print(torch.cuda.device_count())')
NPROC=${NPROC:-$((GPUS == 1 ? 1 : 2))}
CORES=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES / NPROC > 1 ? CORES / NPROC : 1))}
export CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore TORCH_CPP_LOG_LEVEL=ERROR
mkdir -p -- "$RUN_DIR"
echo "$("$BDLM_PYTHON" --version), $CORES cores, $GPUS GPUs: $NPROC processes with $OMP_NUM_THREADS threads each; results in $RUN_DIR"

stage "2/8 corpus: sources of Python's standard library"
[[ -f $RUN_DIR/corpus.jsonl ]] ||
    python tools/build_corpus.py --output "$RUN_DIR/corpus.jsonl" --size-limit-mb "$CORPUS_MB"

stage "3/8 tokenizer: byte-level BPE"
[[ -f $RUN_DIR/tokenizer/tokenizer.json ]] ||
    python tools/train_tokenizer.py --input "$RUN_DIR/corpus.jsonl" --vocab-size "$VOCAB_SIZE" --output "$RUN_DIR/tokenizer"

stage "4/8 tokens: Megatron's .bin and .idx"
[[ -f $RUN_DIR/data/corpus.manifest.json ]] ||
    python tools/preprocess_data.py --input "$RUN_DIR/corpus.jsonl" --output-prefix "$RUN_DIR/data/corpus" \
        --tokenizer-model "$RUN_DIR/tokenizer" --append-eod --workers 2
ENTROPY=$(python -c 'import json, sys; print("%.4f" % json.load(open(sys.argv[1]))["unigram_entropy_nats_per_token"])' \
    "$RUN_DIR/data/corpus.manifest.json")

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
    --seq-length 512
    --max-position-embeddings 512
    --position-embedding-type rope
    --normalization RMSNorm
    --qk-layernorm
    --swiglu
    --disable-bias-linear
)

BDLM_ARGS=(
    --bdlm-recipe bd3lm # blocks of 16 tokens, t between 0.3 and 0.8; validation always over all t
)

TRAINING_ARGS=(
    --train-iters "$TRAIN_ITERS"
    --micro-batch-size 4
    --global-batch-size 8
    --lr 5e-3
    --min-lr 5e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --init-method-std 0.04
    --seed 1234
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size "$NPROC"
    --block-parallel-size "$NPROC"
)

DATA_ARGS=(
    --data-path "$RUN_DIR/data/corpus"
    --split "95,5,0"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$RUN_DIR/tokenizer"
    --data-cache-path "$RUN_DIR/data/cache"
    --num-workers 1
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --eval-interval 75
    --eval-iters 6
    --save "$RUN_DIR/checkpoints"
    --load "$RUN_DIR/checkpoints"
    --save-interval 75
    --ckpt-format torch_dist
    --tensorboard-dir "$RUN_DIR/tensorboard"
)

# What is shown of Megatron's output (all of it is in train.log): these lines, without these fields.
LINES=' iteration +[0-9]+/|validation loss at|(saving|successfully saved|loading|successfully loaded) .*checkpoint|^  bdlm_|block diffusion options|[A-Za-z]+Error(: |$)'
FIELDS='consumed samples|throughput per GPU|learning rate|global batch size|lm loss|diffusion loss per|masked fraction|supervised tokens|parts without|processed rows/s|peak memory|ppl bound|loss scale|number of|[a-z ]+ PPL'
summary() { grep --line-buffered -E "$LINES" | sed -u -E "s#\| *($FIELDS)[^|]*##g; s# *\|? *\$##" || true; }

# Trains from the newest checkpoint, or from random weights when there is none; the arguments are further flags.
train() {
    if ! torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_bdlm.py "$@" \
        "${MODEL_ARGS[@]}" "${BDLM_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
        "${EVAL_AND_LOGGING_ARGS[@]}" 2>&1 | tee -a "$RUN_DIR/train.log" | summary; then
        echo "error: training failed; the whole output is in $RUN_DIR/train.log" >&2
        exit 1
    fi
}

REACHED=$(cat "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
HALF=$((TRAIN_ITERS / 2))

stage "5/8 training, first half: context-sharded block parallelism on $NPROC processes"
if ((REACHED < HALF)); then
    train --exit-interval "$HALF" # ends there with a checkpoint, as at the end of a job's time
else
    echo "done before: checkpoint of iteration $REACHED"
fi

stage "6/8 resume from the checkpoint, second half"
if ((REACHED < TRAIN_ITERS)); then
    train
else
    echo "done before: checkpoint of iteration $REACHED"
fi

stage "7/8 sampling block by block"
python tools/generate.py --load "$RUN_DIR/checkpoints" --max-new-tokens 96 --threshold 0.9 \
    --prompt "$(printf 'import os\nimport sys\n\ndef main(')" | tee "$RUN_DIR/sample.txt"

stage "8/8 plot and check"
python tools/plot_run.py "$RUN_DIR/tensorboard" --output "$RUN_DIR/run.png" --title "quickstart" --unigram-entropy "$ENTROPY"
NELBO=$(python tools/plot_run.py "$RUN_DIR/tensorboard" --last "nelbo validation")
printf '\nvalidation NELBO  %.4f nats per token\nunigram entropy   %.4f nats per token\n' "$NELBO" "$ENTROPY"
printf 'total %d min %02d s, of which packages %d s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$PACKAGES_READY"
if ! python -c 'import sys; sys.exit(not float(sys.argv[1]) < float(sys.argv[2]))' "$NELBO" "$ENTROPY"; then
    echo "error: the validation NELBO is not below the unigram entropy: the model has learned less than token frequencies" >&2
    exit 1
fi
echo "the model predicts better than token frequencies: ok"
