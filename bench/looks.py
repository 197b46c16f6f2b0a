"""How far back each layer and head of a trained model looks: python -m bench.looks [--run DIR] [--data PATH]

Prints a JSON line for each layer and draws a picture (needs matplotlib): the mean attended distance, and the share of
attention that goes to memory, over segments of the valid split. Nothing of it is on the model's own path: attention's
values are replaced by each key's place and by whether it is in memory, so that its output is their mean.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import evaluation
import layer
import train
import txl
from attention import attention
from bench.peers import machine
from data import prepare


@partial(jax.jit, static_argnames="cfg")
def looks(params, ids, mems, cfg):
    """([L, H] mean attended distance in tokens, [L, H] share of attention on memory) of a segment, new memory."""
    T, M, found = ids.shape[1], cfg.mem_len, []
    lo, _ = layer.first_visible(ids, mems.fill, cfg)
    _, new = txl.forward(params, ids, mems, cfg)
    x = txl.embed(params, ids, cfg)
    positions = layer.sinusoids(jnp.arange(M + T - 1, -1, -1), cfg)
    place = jnp.stack([jnp.arange(M + T), jnp.arange(M + T) < M], 1).astype(x.dtype)  # [S, 2]
    for number in range(cfg.n_layer):
        p = jax.tree.map(lambda a: a[number], txl.stacked_layers(params, cfg))
        mem = jnp.where((jnp.arange(M) >= M - mems.fill[:, None])[..., None], mems.h[number], 0)
        cat = jnp.concatenate([mem, x], 1)
        cat = layer.norm(p, cat, 1) if cfg.pre_norm else cat
        q_u, q_v = layer.queries(p, cat[:, M:], cfg)
        k, _ = layer.keys(p, cat, cfg)
        r = jnp.einsum("xd,dhk->hxk", positions, p["w_r"])
        values = jnp.broadcast_to(place, (*k.shape[:2], *place.shape))
        mean = attention(q_u, q_v, k, values, r, lo, block=None)  # [B, H, T, 2]
        found.append(((jnp.arange(T) + M - mean[..., 0]).mean((0, 2)), mean[..., 1].mean((0, 2))))
        x = layer.attention_layer(p, x, mem, lo, positions, cfg)
        x = layer.feed_forward(p, x, cfg)
    distance, share = (jnp.stack(part) for part in zip(*found))
    return distance, share, new


def measured(model, corpus, segments=64, rows=4):
    """The means over segments of the valid split, after those that fill memory."""
    cfg, params, _, run = model
    T = run["flags"]["tgt_len"]
    mems, kept = txl.init_mems(cfg, rows), []
    for number, (ids, *_) in enumerate(evaluation.eval_batches(corpus.valid, rows, T)):
        distance, share, mems = looks(params, ids, mems, cfg)
        if number * T >= cfg.mem_len:
            kept.append((np.asarray(distance), np.asarray(share)))
        if len(kept) == segments:
            break
    if not kept:
        sys.exit(f"bench.looks: the valid split is too short to fill mem_len={cfg.mem_len}: give a longer text")
    return [np.mean(part, 0) for part in zip(*kept)]


def draw(distance, share, path):
    """Two maps, layers by heads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.5 * len(distance) + 1.6), layout="constrained")
    shown = (("mean attended distance, tokens", distance, "{:.0f}"), ("share of attention on memory", share, "{:.2f}"))
    for axes, (title, values, form) in zip(figure.subplots(1, 2), shown):
        picture = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0)
        axes.set(title=title, xlabel="head", ylabel="layer", xticks=range(values.shape[1]), yticks=range(len(values)))
        for (y, x), value in np.ndenumerate(values):
            light = value > 0.6 * values.max()
            axes.text(x, y, form.format(value), ha="center", va="center", color="black" if light else "white")
        figure.colorbar(picture, ax=axes)
    figure.savefig(path, dpi=130)


def main(argv=None):
    parser = argparse.ArgumentParser("python -m bench.looks", description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="", help="run folder or checkpoint; default: the newest run")
    parser.add_argument("--data", default="", help="what it was trained on; default: the built-in corpus")
    parser.add_argument("--out", default="looks.png", help="picture to write")
    args = parser.parse_args(argv)
    try:
        model = train.load(args.run or train.checkpoint.newest_run())
        corpus = prepare.load(args.data or None, None)
        if corpus.vocab != model.vocab:
            raise ValueError("data has another vocabulary than the run: give what it was trained on")
    except (ValueError, OSError) as e:
        sys.exit(f"bench.looks: {e}")
    distance, share = measured(model, corpus)
    for number, (d, s) in enumerate(zip(distance, share)):
        entry = {"layer": number, "mean_distance_tokens": [round(float(x), 1) for x in d]}
        entry |= {"share_on_memory": [round(float(x), 3) for x in s]}
        print(json.dumps(entry | {"mem_len": model.cfg.mem_len, "step": model.run["step"]} | machine()), flush=True)
    try:
        draw(distance, share, Path(args.out))
        print(f"drawn in {args.out}", file=sys.stderr)
    except ImportError:
        sys.exit("bench.looks: matplotlib is missing: pip install matplotlib")


if __name__ == "__main__":
    main()
