# shellcheck shell=bash
# What 03_pretrain.sh and 04_finetune.sh share: DISTRIBUTED_ARGS, MODEL_ARGS, MODEL_PARALLEL_ARGS and the launch. To be sourced behind common.sh:
#
#   MODEL         toy (default), qwen3-8b or qwen3-30b-a3b; with PRETRAINED the shape is the checkpoint's
#   PRETRAINED    a checkpoint folder to start from: of 02_convert_ar.sh or of an earlier run
#   SEQ_LENGTH    clean tokens of a sample (toy: 256, else 131072)
#   TP PP CP BP   parallel sizes (1, 1, all processes, CP); what is left of the world is data parallel
#   EP            expert-parallel size of a model with experts (1); its groups are neighbours too
#   NPROC         processes of this node (default: its GPUs; cpu: 2)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT   set by slurm/launch.sh where there are several nodes
#   DRY_RUN       1: check the options and predict memory and time of NNODES x NPROC GPUs, on one process that needs none
#
# Placement: ranks of a context-parallel group are neighbours (with TP between them), so with TP x CP <= GPUs of a node no key or value
# leaves a node; where a group spans nodes, --bdlm-transport auto sends each row over the network once. `tools/plan_run.py` predicts both.

case ${DRY_RUN:-0} in
    0) ;;
    1) DEVICE=gpu ;; # what is predicted is a run on GPUs, wherever that is done
    *) fail "DRY_RUN=$DRY_RUN: a legal value: 0 or 1" ;;
esac
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
if [[ $DEVICE == cpu ]]; then
    NPROC=${NPROC:-2}
else
    NPROC=${NPROC:-$("$BDLM_PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
    if [[ ${DRY_RUN:-0} == 1 ]]; then
        ((NPROC >= 1)) || fail "no GPU is visible, so NPROC says how many a node has. A legal value: NPROC=8"
    fi
    ((NPROC >= 1)) || fail "no GPU is visible. A legal value: DEVICE=cpu"
fi
DISTRIBUTED_ARGS=(--nproc-per-node "$NPROC")
if [[ -n ${MASTER_ADDR:-} ]]; then
    DISTRIBUTED_ARGS+=(
        --nnodes "$NNODES"
        --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR"
        --master-port "${MASTER_PORT:-29500}"
    )
else
    DISTRIBUTED_ARGS+=(--standalone) # any free port
fi

MODEL=${MODEL:-toy}
case $MODEL in
    toy)
        MODEL_ARGS=(
            --num-layers 4
            --hidden-size 128
            --ffn-hidden-size 384
            --num-attention-heads 4
            --group-query-attention
            --num-query-groups 2
        )
        SEQ_LENGTH=${SEQ_LENGTH:-256}
        ;;
    qwen3-8b) # https://huggingface.co/Qwen/Qwen3-8B, config.json
        MODEL_ARGS=(
            --num-layers 36
            --hidden-size 4096
            --ffn-hidden-size 12288
            --num-attention-heads 32
            --kv-channels 128
            --group-query-attention
            --num-query-groups 8
            --rotary-base 1000000
            --norm-epsilon 1e-6
            --untie-embeddings-and-output-weights
        )
        ;;
    qwen3-30b-a3b) # https://huggingface.co/Qwen/Qwen3-30B-A3B, config.json: 8 of 128 experts, their weights add up to 1
        MODEL_ARGS=(
            --num-layers 48
            --hidden-size 2048
            --ffn-hidden-size 6144
            --num-attention-heads 32
            --kv-channels 128
            --group-query-attention
            --num-query-groups 4
            --rotary-base 1000000
            --norm-epsilon 1e-6
            --untie-embeddings-and-output-weights
            --num-experts 128
            --moe-ffn-hidden-size 768
            --moe-router-topk 8
            --moe-router-load-balancing-type aux_loss
            --moe-aux-loss-coeff 1e-3
            --moe-router-dtype fp32
        )
        [[ $DEVICE == cpu || ${DRY_RUN:-0} == 1 ]] || MODEL_ARGS+=(--moe-grouped-gemm) # its kernels need a GPU to be named
        ;;
    *) fail "MODEL=$MODEL: a legal value: toy, qwen3-8b or qwen3-30b-a3b" ;;
esac
SEQ_LENGTH=${SEQ_LENGTH:-131072}
MODEL_ARGS+=(
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    --normalization RMSNorm
    --qk-layernorm
    --swiglu
    --disable-bias-linear
)
if [[ -n ${PRETRAINED:-} ]]; then
    need "$PRETRAINED" "PRETRAINED names a checkpoint folder, for example $RUNS/convert/block-diffusion of 02_convert_ar.sh"
    MODEL_ARGS=(
        --pretrained-checkpoint "$PRETRAINED" # where --load has no checkpoint yet
        --use-checkpoint-args                 # shape, block size, mask token and label shift
        --seq-length "$SEQ_LENGTH"
        --max-position-embeddings "$SEQ_LENGTH"
    )
fi

TP=${TP:-1}
PP=${PP:-1}
CP=${CP:-$((NPROC * NNODES / TP / PP))}
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --block-parallel-size "${BP:-$CP}"
    --bdlm-transport auto
    --use-distributed-optimizer
    --dist-ckpt-optim-fully-reshardable # a later launch may have other sizes
)
((TP == 1)) || MODEL_PARALLEL_ARGS+=(--sequence-parallel)
((${EP:-1} == 1)) || MODEL_PARALLEL_ARGS+=(--expert-model-parallel-size "$EP")

# train ENTRY FLAGS..: one torchrun on this node. In RUN_DIR: launches.log (date, revision and command of every launch), train.NODE.log (all
# output of all launches), checkpoints/bdlm_options.json (the resolved options).
train() {
    local command=(torchrun "${DISTRIBUTED_ARGS[@]}" "$@") revision
    if [[ ${DRY_RUN:-0} == 1 ]]; then
        LOCAL_WORLD_SIZE=$NPROC python "$@" --dry-run --dry-run-world-size $((NNODES * NPROC))
        return
    fi
    mkdir -p -- "$RUN_DIR"
    if ((NODE_RANK == 0)); then
        revision=$(git describe --always --dirty --abbrev=40 2>/dev/null || echo "no git checkout")
        printf '%s  %s\n    %s\n' "$(date -u +%FT%TZ)" "$revision" "${command[*]@Q}" >>"$RUN_DIR/launches.log"
    fi
    if [[ $DEVICE == cpu ]]; then
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # processes share the cores
    fi
    trap '' USR2 # a job's signal reaches torchrun too, which would die of it; the training processes take it
    "${command[@]}" 2>&1 | tee -a "$RUN_DIR/train.$NODE_RANK.log"
}
