#!/usr/bin/env bash
# Fine-tuning of LLaDA2.0 ("LLaDA2.0: Scaling Up Diffusion Language Models to 100B"): two complementary views, unit weights per corrupted token.
#
#     MOCK=0 CONVERSATIONS=chat.jsonl PRETRAINED=runs/pretrain-qwen3-8b/checkpoints bash examples/recipes/llada2-sft.sh
#
# The block-size warm-up of its pretraining is --bdlm-block-size-schedule of 03_pretrain.sh.
#
# --bdlm-recipe llada2-sft, every flag written out (docs/objectives.md). Models, data and parallel sizes: the variables of 04_finetune.sh.
# Arguments are further flags and win.
set -euo pipefail

BDLM_ARGS=(
    --bdlm-block-size 32
    --bdlm-clean-attention block-causal
    --bdlm-noisy-attention bidirectional
    --bdlm-views 2
    --no-bdlm-keep-mask-logit
    --bdlm-corruption absorbing
    --bdlm-noise-schedule linear
    --bdlm-noise-eps 0.001
    --bdlm-noise-level-per block
    --bdlm-noise-draw stratified
    --bdlm-t-min 0.3
    --bdlm-t-max 0.8
    --no-bdlm-force-one-corrupted
    --bdlm-loss-weight unit
    --bdlm-loss-denominator masked
    --bdlm-label-shift none
    --bdlm-diffusion-loss-weight 1.0
    --bdlm-clean-loss-weight 0.0
    --bdlm-clean-loss-tokens supervised
    --bdlm-self-conditioning 0.0
    --no-bdlm-freeze-router
)
RUN_DIR=${RUN_DIR:-${RUNS:-runs}/recipe-llada2-sft}
# shellcheck source=examples/04_finetune.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../04_finetune.sh"
