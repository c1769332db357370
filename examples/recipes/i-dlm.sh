#!/usr/bin/env bash
# I-DLM (Introspective Diffusion Language Models): strictly causal, short blocks that are all masks, and a little next-token loss on the clean rows.
#
#     RECIPE=i-dlm bash examples/02_convert_ar.sh
#     MOCK=0 PRETRAINED=runs/convert/block-diffusion bash examples/recipes/i-dlm.sh
#
# --bdlm-recipe i-dlm, every flag written out (docs/objectives.md). Models, data and parallel sizes: the variables of 03_pretrain.sh.
# Arguments are further flags and win.
set -euo pipefail

BDLM_ARGS=(
    --bdlm-block-size 3
    --bdlm-clean-attention token-causal
    --bdlm-noisy-attention causal
    --bdlm-views 1
    --no-bdlm-keep-mask-logit
    --bdlm-corruption absorbing
    --bdlm-noise-schedule linear
    --bdlm-noise-eps 0.001
    --bdlm-noise-level-per block
    --bdlm-noise-draw stratified
    --bdlm-t-min 1.0
    --bdlm-t-max 1.0
    --no-bdlm-force-one-corrupted
    --bdlm-loss-weight unit
    --bdlm-loss-denominator supervised
    --bdlm-label-shift next
    --bdlm-diffusion-loss-weight 1.0
    --bdlm-clean-loss-weight 0.2
    --bdlm-clean-loss-tokens supervised
    --bdlm-self-conditioning 0.0
    --no-bdlm-freeze-router
)
RUN_DIR=${RUN_DIR:-${RUNS:-runs}/recipe-i-dlm}
# shellcheck source=examples/03_pretrain.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../03_pretrain.sh"
