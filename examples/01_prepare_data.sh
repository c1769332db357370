#!/usr/bin/env bash
# Step 1: raw text becomes a tokenizer and Megatron's .bin and .idx. Needs no GPU.
#
#     bash examples/01_prepare_data.sh                                     # the sources of Python's standard library
#     MOCK=0 INPUT=corpus.jsonl bash examples/01_prepare_data.sh
#     MOCK=0 INPUT=corpus.jsonl TOKENIZER=/models/Qwen3-8B bash examples/01_prepare_data.sh
#
#   INPUT        JSON lines (text under "text"), a text file, or a folder of them; with MOCK=1 it is made: CORPUS_MB megabytes (4)
#   TOKENIZER    a folder of a Hugging Face tokenizer (default: DATA_DIR/tokenizer, trained on INPUT with VOCAB_SIZE tokens, 1024)
#   WORKERS      processes that tokenize (2)
#   DATA_DIR     where everything goes (default: RUNS/data); what is there already is kept
#   RUNS, MOCK, BDLM_PYTHON ..   see examples/common.sh
set -euo pipefail

# shellcheck source=examples/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
mkdir -p -- "$DATA_DIR"

stage "1/4 text"
if [[ $MOCK == 1 ]]; then
    INPUT=$DATA_DIR/text.jsonl
    if [[ ! -f $INPUT ]]; then
        python tools/build_corpus.py --output "$DATA_DIR/all.jsonl" --size-limit-mb "${CORPUS_MB:-4}"
        awk 'NR % 16 == 0' "$DATA_DIR/all.jsonl" >"$DATA_DIR/held_out.jsonl" # for step 6: no training run sees it
        awk 'NR % 16 != 0' "$DATA_DIR/all.jsonl" >"$INPUT"
    fi
fi
need "${INPUT:?MOCK=0 needs INPUT: JSON lines, a text file or a folder}" "INPUT names JSON lines, a text file or a folder"
echo "$INPUT"

stage "2/4 tokenizer"
[[ -f $TOKENIZER/tokenizer.json ]] ||
    python tools/train_tokenizer.py --input "$INPUT" --vocab-size "${VOCAB_SIZE:-1024}" --output "$TOKENIZER"
echo "$TOKENIZER"

stage "3/4 tokens"
[[ -f $DATA_DIR/train.manifest.json ]] ||
    python tools/preprocess_data.py --input "$INPUT" --output-prefix "$DATA_DIR/train" \
        --tokenizer-model "$TOKENIZER" --append-eod --workers "${WORKERS:-2}"

stage "4/4 checked, and a sample with its noise"
python tools/validate_data.py "$DATA_DIR/train" --tokenizer-model "$TOKENIZER"
python tools/inspect_data.py "$DATA_DIR/train" --tokenizer-model "$TOKENIZER" --seq-length 64 --bdlm-recipe bd3lm
