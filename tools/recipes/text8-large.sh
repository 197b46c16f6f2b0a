#!/usr/bin/env bash
# The paper's 24 layers on text8: 1.08 bits per character on test there. 277.1 M parameters.
set -e
cd "$(dirname "$0")/../.."

python -m data.prepare text8
python train.py --data text8 --out runs/text8-large --n_layer 24 --d_model 1024 --n_head 8 --d_head 128 \
  --d_inner 3072 --dropout 0.15 --dropatt 0.15 --optimizer adam --lr 2.5e-4 --beta2 0.999 --warmup 4000 \
  --schedule cosine --clip 0.25 --mem_reset 0 --steps 400000 --batch 64 --tgt_len 768 --mem_len 768 --eval_every 4000
python train.py --eval_only --run runs/text8-large --split test --eval_batch 1 --tgt_len 128 --mem_len 3800 \
  --clamp_len 1000 --same_length
