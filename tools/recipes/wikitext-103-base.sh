#!/usr/bin/env bash
# The paper's 16 layers on WikiText-103: perplexity 24.0 on test there. 151.1 M parameters.
set -e
cd "$(dirname "$0")/../.."

python -m data.prepare wikitext-103
python train.py --data wikitext-103 --out runs/wikitext-103-base --n_layer 16 --d_model 410 --n_head 10 --d_head 41 \
  --d_inner 2100 --cutoffs 20000,40000,200000 --div_val 1 --dropout 0.1 --dropatt 0 --optimizer adam --lr 2.5e-4 \
  --beta2 0.999 --warmup 0 --schedule cosine --clip 0.25 --mem_reset 0 --steps 200000 --batch 60 --tgt_len 150 \
  --mem_len 150 --eval_every 4000
python train.py --eval_only --run runs/wikitext-103-base --split test --eval_batch 1 --tgt_len 64 --mem_len 640 \
  --clamp_len 400 --same_length
