#!/usr/bin/env bash
# Ours: tinyshakespeare by characters, 1.46 nats on its valid part in 11 minutes of one CPU core. 0.65 M parameters.
set -e
cd "$(dirname "$0")/../.."

python -m data.prepare shakespeare
python train.py --data shakespeare --out runs/shakespeare --n_layer 3 --d_model 128 --n_head 4 --d_head 32 \
  --d_inner 512 --mem_len 32 --tgt_len 32 --batch 32 --layer_rows 32 --lr 0.012 --momentum 0.8 --warmup 20 \
  --weight_decay 0.1 --steps 3000 --eval_every 500
