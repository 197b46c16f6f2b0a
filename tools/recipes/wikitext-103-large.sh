#!/usr/bin/env bash
# The paper's 18 layers on WikiText-103: perplexity 18.3 on test there. 285.2 M parameters.
set -e
cd "$(dirname "$0")/../.."

python -m data.prepare wikitext-103
python train.py --data wikitext-103 --out runs/wikitext-103-large --n_layer 18 --d_model 1024 --n_head 16 --d_head 64 \
  --d_inner 4096 --cutoffs 20000,40000,200000 --div_val 4 --untie_r --dropout 0.2 --dropatt 0.2 --optimizer adam \
  --lr 2.5e-4 --beta2 0.999 --warmup 16000 --schedule cosine --clip 0.25 --mem_reset 0 --steps 4000000 --batch 128 \
  --tgt_len 384 --mem_len 384 --eval_every 4000
python train.py --eval_only --run runs/wikitext-103-large --split test --eval_batch 1 --tgt_len 128 --mem_len 1600 \
  --clamp_len 1000 --same_length
