#!/usr/bin/env bash
# Fast-dLLM v2 (https://arxiv.org/abs/2509.26328): an autoregressive model keeps its shift by one token; two complementary views score every
# token once.
#
#     RECIPE=fast-dllm-v2 bash examples/02_convert_ar.sh
#     MOCK=0 PRETRAINED=runs/convert/block-diffusion bash examples/recipes/fast-dllm-v2.sh
#
# --bdlm-recipe fast-dllm-v2, every flag written out (docs/objectives.md). Models, data and parallel sizes: the variables of 03_pretrain.sh.
# Arguments are further flags and win.
set -euo pipefail

BDLM_ARGS=(
    --bdlm-block-size 32
    --bdlm-clean-attention block-causal
    --bdlm-noisy-attention bidirectional
    --bdlm-views 2
    --bdlm-keep-mask-logit
    --bdlm-corruption absorbing
    --bdlm-noise-schedule linear
    --bdlm-noise-eps 0.001
    --bdlm-noise-level-per block
    --bdlm-noise-draw stratified
    --bdlm-t-min 0.001
    --bdlm-t-max 1.0
    --no-bdlm-force-one-corrupted
    --bdlm-loss-weight unit
    --bdlm-loss-denominator supervised
    --bdlm-label-shift next
    --bdlm-diffusion-loss-weight 1.0
    --bdlm-clean-loss-weight 0.0
    --bdlm-clean-loss-tokens supervised
    --bdlm-self-conditioning 0.0
    --no-bdlm-freeze-router
)
RUN_DIR=${RUN_DIR:-${RUNS:-runs}/recipe-fast-dllm-v2}
# shellcheck source=examples/03_pretrain.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../03_pretrain.sh"
