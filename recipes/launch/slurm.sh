#!/bin/bash
# A Gemma with LoRA on four nodes of eight GPUs each: sbatch recipes/launch/slurm.sh
#
#SBATCH --job-name=gemma-lora
#SBATCH --nodes=4
# A process for each GPU: on SLURM, JAX takes the GPU whose number is the task's on its node.
#SBATCH --ntasks-per-node=8
# For the node, not for the task: a task that sees one GPU alone cannot take its third.
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
# Five minutes before the time is over: the recipe saves, and ends with exit code 143.
#SBATCH --signal=TERM@300
# A run that starts again adds to its log.
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

export KERAS_BACKEND="${KERAS_BACKEND:-jax}"
# Weights lie in eight parts inside a node, where links are fast; between nodes go gradients alone.
# --resume goes on from the newest good checkpoint, and begins where there is none.
run=(recipes/gemma_lora.py --weights "${WEIGHTS:?a directory that every node sees}"
    --data "${DATA:?a .jsonl file}" --mesh data=4,fsdp=8 --batch-size 64 --sequence-length 2048
    --precision bfloat16 --remat block --out "${OUT:-runs/gemma}" --resume)

status=0
if [[ $KERAS_BACKEND == torch ]]; then
    # torchrun starts the processes of a node, so SLURM starts one torchrun there.
    # Not through head, whose end would end scontrol, and by pipefail this script.
    read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    # Restarted processes meet in a new store, where nothing is left of those before them.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # Without both numbers srun takes SLURM_NTASKS, a task for each GPU.
    srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --cpus-per-task=96 \
        --kill-on-bad-exit=1 torchrun \
        --nnodes="$SLURM_NNODES" --nproc-per-node=8 --max-restarts=3 \
        --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:29500" \
        "${run[@]}" || status=$?
else
    # Where one process ends, SLURM ends the others, which would wait for it. From 22.05 to 23.02
    # srun did not take over the number of CPUs.
    srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 python "${run[@]}" || status=$?
fi

# 2 is a wrong setting, which no restart makes right; everything else goes on from its checkpoint.
if ((status != 0 && status != 2 && ${SLURM_RESTART_COUNT:-0} < 10)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
