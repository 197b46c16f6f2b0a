#!/usr/bin/env bash
# 12 layers on Penn Treebank, 24.2 M parameters: a guess of the paper's size, see "Reproduce" in README.md.
set -e
cd "$(dirname "$0")/../.."

python -m data.prepare ptb
python train.py --data ptb --out runs/ptb --n_layer 12 --d_model 400 --n_head 10 --d_head 40 --d_inner 1100 \
  --dropout 0.4 --dropatt 0.2 --optimizer adam --lr 2.5e-4 --beta2 0.999 --warmup 1000 --schedule cosine --clip 0.25 \
  --mem_reset 0 --steps 60000 --batch 20 --tgt_len 70 --mem_len 70 --eval_every 1000
python train.py --eval_only --run runs/ptb --split test --eval_batch 1 --tgt_len 35 --mem_len 210 --clamp_len 140 \
  --same_length
