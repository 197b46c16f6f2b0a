#!/usr/bin/env bash
# The paper's 12 layers on enwik8: 1.06 bits per byte on test there. 41.1 M parameters.
set -e
cd "$(dirname "$0")/../.."

python -m data.prepare enwik8
python train.py --data enwik8 --out runs/enwik8-base --n_layer 12 --d_model 512 --n_head 8 --d_head 64 --d_inner 2048 \
  --dropout 0.1 --dropatt 0 --optimizer adam --lr 2.5e-4 --beta2 0.999 --warmup 0 --schedule cosine --clip 0.25 \
  --mem_reset 0 --steps 400000 --batch 22 --tgt_len 512 --mem_len 512 --eval_every 4000
python train.py --eval_only --run runs/enwik8-base --split test --eval_batch 1 --tgt_len 80 --mem_len 2100 \
  --clamp_len 820 --same_length
