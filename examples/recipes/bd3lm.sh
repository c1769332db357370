#!/usr/bin/env bash
# BD3-LM (https://arxiv.org/abs/2503.09573): the NELBO of blocks, with noise levels clipped where its variance is small. For blocks of 4
# the authors clip to .45 - .95 instead.
#
#     bash examples/recipes/bd3lm.sh
#
# --bdlm-recipe bd3lm, every flag written out (docs/objectives.md). Models, data and parallel sizes: the variables of 03_pretrain.sh.
# Arguments are further flags and win.
set -euo pipefail

BDLM_ARGS=(
    --bdlm-block-size 16
    --bdlm-clean-attention block-causal
    --bdlm-noisy-attention bidirectional
    --bdlm-views 1
    --no-bdlm-keep-mask-logit
    --bdlm-corruption absorbing
    --bdlm-noise-schedule linear
    --bdlm-noise-eps 0.001
    --bdlm-noise-level-per block
    --bdlm-noise-draw stratified
    --bdlm-t-min 0.3
    --bdlm-t-max 0.8
    --no-bdlm-force-one-corrupted
    --bdlm-loss-weight nelbo
    --bdlm-loss-denominator supervised
    --bdlm-label-shift none
    --bdlm-diffusion-loss-weight 1.0
    --bdlm-clean-loss-weight 0.0
    --bdlm-clean-loss-tokens supervised
    --bdlm-self-conditioning 0.0
    --no-bdlm-freeze-router
)
RUN_DIR=${RUN_DIR:-${RUNS:-runs}/recipe-bd3lm}
# shellcheck source=examples/03_pretrain.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../03_pretrain.sh"
