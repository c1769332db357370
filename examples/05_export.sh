#!/usr/bin/env bash
# Step 5: back to Hugging Face, checked: `transformers` computes the same logits. Needs no GPU.
#
#     bash examples/05_export.sh                                           # the checkpoint of step 4
#     LOAD=runs/pretrain-qwen3-8b/checkpoints RUN_DIR=/models/mine bash examples/05_export.sh
#
#   LOAD      checkpoint folder of a run, or one iter_* in it (default: RUNS/finetune/checkpoints)
#   RUN_DIR   folder to be written, whole or not at all (default: RUNS/export); one that is there is kept and checked
#   RUNS, BDLM_PYTHON ..   see examples/common.sh
set -euo pipefail

# shellcheck source=examples/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
LOAD=${LOAD:-$RUNS/finetune/checkpoints}
RUN_DIR=${RUN_DIR:-$RUNS/export}
need "$LOAD" "LOAD names the checkpoint folder of a run (03_pretrain.sh, 04_finetune.sh)"

stage "1/2 export"
[[ -d $RUN_DIR ]] || python tools/convert_checkpoint.py export --load "$LOAD" --save "$RUN_DIR"

stage "2/2 the same logits in transformers"
python tools/convert_checkpoint.py verify --source "$RUN_DIR" --load "$LOAD"
