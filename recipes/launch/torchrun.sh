#!/bin/bash
# A Gemma with LoRA on the eight GPUs of one machine, on torch: recipes/launch/torchrun.sh
#
# A process for each GPU; torchrun tells each its rank. If one dies torchrun ends the others and
# starts all anew, at most three times, and --resume goes on from the newest good checkpoint.
# On several machines run the same line on each, with HEAD the first one's name, in place of
# --standalone: --nnodes=4 --rdzv-backend=c10d --rdzv-id=gemma --rdzv-endpoint=HEAD:29500
# and with --mesh data=4,fsdp=8; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each restart a new store.
# JAX needs none of this on one machine: python recipes/gemma_lora.py --mesh fsdp=8 takes all GPUs.
set -euo pipefail

export KERAS_BACKEND=torch
exec torchrun --standalone --nproc-per-node=8 --max-restarts=3 recipes/gemma_lora.py \
    --weights "${WEIGHTS:?a directory}" --data "${DATA:?a .jsonl file}" --mesh fsdp=8 \
    --batch-size 16 --sequence-length 2048 --precision bfloat16 --remat block \
    --out "${OUT:-runs/gemma}" --resume
