#!/usr/bin/env bash
# SDAR (https://arxiv.org/abs/2510.06303): an autoregressive model is adapted with one noise level a document and the NELBO over all levels.
#
#     RECIPE=sdar bash examples/02_convert_ar.sh
#     MOCK=0 PRETRAINED=runs/convert/block-diffusion bash examples/recipes/sdar.sh
#
# --bdlm-recipe sdar, every flag written out (docs/objectives.md). Models, data and parallel sizes: the variables of 03_pretrain.sh.
# Arguments are further flags and win.
set -euo pipefail

BDLM_ARGS=(
    --bdlm-block-size 32
    --bdlm-clean-attention block-causal
    --bdlm-noisy-attention bidirectional
    --bdlm-views 1
    --no-bdlm-keep-mask-logit
    --bdlm-corruption absorbing
    --bdlm-noise-schedule linear
    --bdlm-noise-eps 0.001
    --bdlm-noise-level-per document
    --bdlm-noise-draw stratified
    --bdlm-t-min 0.001
    --bdlm-t-max 1.0
    --bdlm-force-one-corrupted
    --bdlm-loss-weight nelbo
    --bdlm-loss-denominator supervised
    --bdlm-label-shift none
    --bdlm-diffusion-loss-weight 1.0
    --bdlm-clean-loss-weight 0.0
    --bdlm-clean-loss-tokens supervised
    --bdlm-self-conditioning 0.0
    --no-bdlm-freeze-router
)
RUN_DIR=${RUN_DIR:-${RUNS:-runs}/recipe-sdar}
# shellcheck source=examples/03_pretrain.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../03_pretrain.sh"
