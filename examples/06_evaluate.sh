#!/usr/bin/env bash
# Step 6: the NELBO of held-out text, which bounds its perplexity, and sampled continuations, block by block.
#
#     bash examples/06_evaluate.sh                                         # the checkpoint of step 4, the held-out text of step 1
#     LOAD=runs/pretrain-qwen3-8b/checkpoints TEXT=held_out.jsonl SEQ_LENGTH=4096 PROMPT="def main(" bash examples/06_evaluate.sh
#
#   LOAD         checkpoint folder of a run, or one iter_* in it (default: RUNS/finetune/checkpoints)
#   TEXT         text that training has not seen (default: DATA_DIR/held_out.jsonl, made by step 1 with MOCK=1)
#   SEQ_LENGTH   tokens of a window of it (256)       LIMIT, DRAWS      windows (16), and noises of each (4)
#   PROMPT       what is continued, by at most MAX_NEW_TOKENS (48); THRESHOLD: certainty that commits a token at once (0.9)
#   TP           tensor-parallel size and processes (1), where the model does not fit one GPU
#   RUN_DIR      results (default: RUNS/evaluate)
#   RUNS, DEVICE, BDLM_PYTHON ..   see examples/common.sh
set -euo pipefail

# shellcheck source=examples/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
LOAD=${LOAD:-$RUNS/finetune/checkpoints}
TEXT=${TEXT:-$DATA_DIR/held_out.jsonl}
RUN_DIR=${RUN_DIR:-$RUNS/evaluate}
need "$LOAD" "LOAD names the checkpoint folder of a run (03_pretrain.sh, 04_finetune.sh)"
need "$TEXT" "TEXT names text that training has not seen (JSON lines, a text file or a folder)"
mkdir -p -- "$RUN_DIR"

TP=${TP:-1}
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size "$TP")
RUN=(python)
((TP == 1)) || RUN=(torchrun --standalone --nproc-per-node "$TP")


EVALUATION_ARGS=(
    --text "$TEXT"
    --seq-length "${SEQ_LENGTH:-256}"
    --limit "${LIMIT:-16}"
    --draws "${DRAWS:-4}"
    --output "$RUN_DIR/result.json"
)
SAMPLING_ARGS=(
    --prompt "${PROMPT-$'What does len do?\n'}" # as the conversations of step 4 begin
    --max-new-tokens "${MAX_NEW_TOKENS:-48}"
    --threshold "${THRESHOLD:-0.9}"
)

stage "1/2 NELBO of $TEXT"
"${RUN[@]}" tools/evaluate.py --load "$LOAD" "${MODEL_PARALLEL_ARGS[@]}" "${EVALUATION_ARGS[@]}"

stage "2/2 sampling"
"${RUN[@]}" tools/generate.py --load "$LOAD" "${MODEL_PARALLEL_ARGS[@]}" "${SAMPLING_ARGS[@]}" | tee "$RUN_DIR/sample.txt"
