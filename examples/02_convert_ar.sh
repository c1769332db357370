#!/usr/bin/env bash
# Step 2, where a model starts from an autoregressive one: Hugging Face to Megatron, checked, then a mask token. Needs no GPU.
#
#     bash examples/02_convert_ar.sh                                       # a toy Qwen3 of random weights, with step 1's tokenizer
#     MOCK=0 SOURCE=/models/Qwen3-8B RECIPE=fast-dllm-v2 bash examples/02_convert_ar.sh
#
#   SOURCE       a Hugging Face folder (safetensors) or a GGUF file
#   RECIPE       which objective the model will be trained with (bd3lm); BLOCK_SIZE: tokens of a block (the recipe's)
#   MASK_TOKEN   its text; added where the tokenizer lacks it (<|mask|>)
#   RUN_DIR      where everything goes (default: RUNS/convert); what is there already is kept. Step 3 takes RUN_DIR/block-diffusion
#   RUNS, MOCK, BDLM_PYTHON ..   see examples/common.sh
set -euo pipefail

# shellcheck source=examples/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
RUN_DIR=${RUN_DIR:-$RUNS/convert}
mkdir -p -- "$RUN_DIR"

stage "1/4 an autoregressive model"
if [[ $MOCK == 1 ]]; then
    need "$TOKENIZER" "the mock model takes the tokenizer of 01_prepare_data.sh"
    SOURCE=$RUN_DIR/source
    [[ -f $SOURCE/tokenizer.json ]] || python - "$TOKENIZER" "$SOURCE" <<'PYTHON'
import sys
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
torch.manual_seed(1234)
config = Qwen3Config(
    vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
)
Qwen3ForCausalLM(config).save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
PYTHON
fi
need "${SOURCE:?MOCK=0 needs SOURCE: a Hugging Face folder or a GGUF file}" "SOURCE names a Hugging Face folder or a GGUF file"
echo "$SOURCE"

stage "2/4 import"
[[ -d $RUN_DIR/autoregressive ]] || python tools/convert_checkpoint.py import --source "$SOURCE" --save "$RUN_DIR/autoregressive"

stage "3/4 the same logits as transformers"
python tools/convert_checkpoint.py verify --source "$SOURCE" --load "$RUN_DIR/autoregressive"

stage "4/4 a mask token: a block diffusion model, not trained as one yet"
BDLM_ARGS=(--bdlm-recipe "${RECIPE:-bd3lm}")
[[ -z ${BLOCK_SIZE:-} ]] || BDLM_ARGS+=(--bdlm-block-size "$BLOCK_SIZE")
[[ -d $RUN_DIR/block-diffusion ]] ||
    python tools/convert_checkpoint.py to-bdlm --load "$RUN_DIR/autoregressive" --save "$RUN_DIR/block-diffusion" \
        --mask-token "${MASK_TOKEN:-<|mask|>}" "${BDLM_ARGS[@]}"
echo "next: MOCK=0 PRETRAINED=$RUN_DIR/block-diffusion bash examples/03_pretrain.sh"
