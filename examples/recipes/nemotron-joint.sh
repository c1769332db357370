#!/usr/bin/env bash
# The joint objective of Nemotron-Labs Diffusion: one model predicts autoregressively from its clean rows and by blocks from its noisy ones.
#
#     RECIPE=nemotron-joint bash examples/02_convert_ar.sh
#     MOCK=0 PRETRAINED=runs/convert/block-diffusion bash examples/recipes/nemotron-joint.sh
#
# --bdlm-recipe nemotron-joint, every flag written out (docs/objectives.md). Models, data and parallel sizes: the variables of 03_pretrain.sh.
# Arguments are further flags and win.
set -euo pipefail

BDLM_ARGS=(
    --bdlm-block-size 64
    --bdlm-clean-attention token-causal
    --bdlm-noisy-attention bidirectional
    --bdlm-views 1
    --no-bdlm-keep-mask-logit
    --bdlm-corruption absorbing
    --bdlm-noise-schedule linear
    --bdlm-noise-eps 0.001
    --bdlm-noise-level-per block
    --bdlm-noise-draw stratified
    --bdlm-t-min 0.001
    --bdlm-t-max 1.0
    --no-bdlm-force-one-corrupted
    --bdlm-loss-weight nelbo
    --bdlm-loss-denominator supervised
    --bdlm-label-shift none
    --bdlm-diffusion-loss-weight 0.3
    --bdlm-clean-loss-weight 1.0
    --bdlm-clean-loss-tokens supervised
    --bdlm-self-conditioning 0.0
    --no-bdlm-freeze-router
)
RUN_DIR=${RUN_DIR:-${RUNS:-runs}/recipe-nemotron-joint}
# shellcheck source=examples/03_pretrain.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../03_pretrain.sh"
