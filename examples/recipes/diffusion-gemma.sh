#!/usr/bin/env bash
# DiffusionGemma's fine-tuning: canvases whose tokens are replaced at random from the whole vocabulary, half of the samples
# self-conditioned, and a next-token loss on all clean rows; routers are left as they are (docs/diffusion_gemma.md).
#
#     MOCK=0 CONVERSATIONS=chat.jsonl TOKENIZER=gemma/tokenizer PRETRAINED=gemma bash examples/recipes/diffusion-gemma.sh
#
# PRETRAINED is an import of a DiffusionGemma, as examples/diffusion_gemma.sh makes a tiny one; no other model has self-conditioning. The block
# size is the checkpoint's.
#
# --bdlm-recipe diffusion-gemma, every flag written out (docs/objectives.md). Models, data and parallel sizes: the variables of 04_finetune.sh.
# Arguments are further flags and win.
set -euo pipefail

BDLM_ARGS=(
    --bdlm-clean-attention token-causal
    --bdlm-noisy-attention bidirectional
    --bdlm-views 1
    --bdlm-keep-mask-logit
    --bdlm-corruption uniform
    --bdlm-noise-schedule linear
    --bdlm-noise-eps 0.0
    --bdlm-noise-level-per block
    --bdlm-noise-draw stratified
    --bdlm-t-min 0.001
    --bdlm-t-max 1.0
    --no-bdlm-force-one-corrupted
    --bdlm-loss-weight unit
    --bdlm-loss-denominator block-mean
    --bdlm-label-shift none
    --bdlm-diffusion-loss-weight 1.0
    --bdlm-clean-loss-weight 1.0
    --bdlm-clean-loss-tokens all
    --bdlm-self-conditioning 0.5
    --bdlm-freeze-router
)
RUN_DIR=${RUN_DIR:-${RUNS:-runs}/recipe-diffusion-gemma}
# shellcheck source=examples/04_finetune.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../04_finetune.sh"
