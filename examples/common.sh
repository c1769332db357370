# shellcheck shell=bash
# What the numbered scripts and the recipes have in common. To be sourced, first. Relative paths start at the repository's root.
#
#   RUNS      folder of everything that is written (default: runs): data, convert, pretrain-MODEL, finetune, export, evaluate
#   DEVICE    gpu (default) or cpu
#   MOCK      1 (default): data that need nothing from outside; 0: yours
#   DATA_DIR, TOKENIZER   what 01_prepare_data.sh wrote (defaults: RUNS/data, DATA_DIR/tokenizer)
#   BDLM_VENV, BDLM_PYTHON, BDLM_PIP_ARGS   the Python environment: see environment.sh

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit
RUNS=${RUNS:-runs}
DEVICE=${DEVICE:-gpu}
MOCK=${MOCK:-1}
DATA_DIR=${DATA_DIR:-$RUNS/data}
TOKENIZER=${TOKENIZER:-$DATA_DIR/tokenizer}

stage() { printf '\n=== [%2d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# need PATH HINT: ends with the hint where PATH is missing.
need() { [[ -e $1 ]] || fail "$1 is missing: $2"; }

case $DEVICE in
    gpu) ;;
    cpu) export CUDA_VISIBLE_DEVICES="" ;;
    *) fail "DEVICE=$DEVICE: a legal value: gpu or cpu" ;;
esac
[[ $MOCK == [01] ]] || fail "MOCK=$MOCK: a legal value: 1 or 0"

# shellcheck source=examples/environment.sh
source examples/environment.sh
export CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false
