# shellcheck shell=bash
# The common part of the batch scripts beside it: starts SCRIPT (examples/03_pretrain.sh) once on every node of the job, and puts the job
# back into the queue while that helps. To be sourced, with the variables of that script exported.
#
# Slurm sends SIGUSR2 to every process of the step ten minutes before the time limit (--signal): the training processes save a
# checkpoint and leave. How a launch ended stands in checkpoints/bdlm_exit.txt (docs/operations.md): with steps left (75), a lost or
# hung peer (76), or no word at all (a node that went down), the job goes back into the queue, provided that this launch has added a step.
# After any other fault, which would only come again, it ends with the fault's code.

: "${RUN_DIR:?RUN_DIR is needed: a folder that every node sees}" "${TRAIN_ITERS:?}"

reached() { cat -- "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # whole: under pipefail `| head -n 1` may end the script by SIGPIPE
MASTER_ADDR=${HOSTS%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node do not meet
NNODES=$SLURM_JOB_NUM_NODES
export MASTER_ADDR MASTER_PORT NNODES SCRIPT=${SCRIPT:-examples/03_pretrain.sh}

mkdir -p -- "$RUN_DIR"
rm -f -- "$RUN_DIR/checkpoints/bdlm_exit.txt"
BEFORE=$(reached)
printf '=== %s: job %s on %s, from step %s of %s\n' "$(date)" "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST" "$BEFORE" "$TRAIN_ITERS"
# With a container runtime: srun --container-image=IMAGE --container-mounts="$PWD:$PWD" ..
CODE=0
# shellcheck disable=SC2016 # SLURM_NODEID is expanded on each node
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$SCRIPT"' || CODE=$?

AFTER=$(reached)
ENDING="$CODE unknown no word of the training processes"
if [[ -f $RUN_DIR/checkpoints/bdlm_exit.txt ]]; then
    ENDING=$(head -n 1 -- "$RUN_DIR/checkpoints/bdlm_exit.txt")
fi
echo "=== ended: $ENDING"
case $ENDING in
    0\ * | 75\ * | 76\ * | *\ unknown\ *)
        if ((AFTER >= TRAIN_ITERS)); then
            echo "done: step $AFTER"
        elif ((AFTER > BEFORE)); then
            echo "step $AFTER of $TRAIN_ITERS: back into the queue"
            scontrol requeue "$SLURM_JOB_ID"
        else
            echo "error: no step was added to $BEFORE; see $RUN_DIR/train.*.log" >&2
            exit 1
        fi
        ;;
    *)
        echo "error: not put back into the queue; see $RUN_DIR/train.*.log" >&2
        exit "${ENDING%% *}"
        ;;
esac
