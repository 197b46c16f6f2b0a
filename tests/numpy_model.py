"""Transformer-XL a second time, in numpy float64 and plain loops: what the JAX code is tested against.

Slow and obvious on purpose: one row, head, query and key at a time, every distance looked up directly. Written from the
paper (Dai et al. 2019, arXiv:1901.02860, section 3 and equation 2); it shares no code with `txl.py`.
"""

import numpy as np


def as_float64(tree):
    if isinstance(tree, dict):
        return {name: as_float64(branch) for name, branch in tree.items()}
    return np.asarray(tree, np.float64)


def layer_norm(x, scale, bias):
    centred = x - x.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-5) * scale + bias


def log_softmax(x):
    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def sinusoid(distance, cfg):
    """R_distance of the paper, [D]: the sines first, then the cosines."""
    if cfg.clamp_len > 0:
        distance = min(distance, cfg.clamp_len)
    angles = np.array([distance * 10000.0 ** (-i / cfg.d_model) for i in range(0, cfg.d_model, 2)])
    return np.concatenate([np.sin(angles), np.cos(angles)])


def find_cluster(word, cfg):
    """(i, first word of cluster i, one past its last word) of the cluster that holds the word; the head is 0."""
    i = sum(word >= cutoff for cutoff in cfg.cutoffs)
    return i, [0, *cfg.cutoffs][i], [*cfg.cutoffs, cfg.n_token][i]


def embed_token(params, word, cfg):
    """[D]: the word's row of the table that holds it, projected where there is a projection, times sqrt(D)."""
    i, start, _ = find_cluster(word, cfg) if cfg.div_val > 1 else (0, 0, None)
    x = params[f"embed_{i}"][word - start]
    if cfg.div_val > 1 or cfg.d_embed != cfg.d_model:
        x = x @ params[f"embed_proj_{i}"]
    return x * np.sqrt(cfg.d_model)


def attend(layer, u, v, context, n_query, cfg):
    """Context is a list of vectors [D], all of them real; the last n_query of them ask. [n_query, D]."""
    outputs = np.zeros((n_query, cfg.d_model))
    for head in range(cfg.n_head):
        w_q, w_k, w_v, w_r = (layer[name][:, head] for name in ("w_q", "w_k", "w_v", "w_r"))  # [D, K] each
        keys = [x @ w_k for x in context]
        values = [x @ w_v for x in context]
        relative = [sinusoid(distance, cfg) @ w_r for distance in range(len(context))]
        for t in range(n_query):
            here = len(context) - n_query + t
            first = max(0, here - cfg.mem_len) if cfg.same_length else 0
            query = context[here] @ w_q
            scores = []
            for s in range(first, here + 1):
                content = (query + u[head]) @ keys[s]  # terms (a) and (c) of equation 2
                position = (query + v[head]) @ relative[here - s]  # terms (b) and (d)
                scores.append((content + position) / np.sqrt(cfg.d_head))
            weights = np.exp(log_softmax(np.array(scores)))
            for s in range(first, here + 1):
                outputs[t] += weights[s - first] * values[s] @ layer["w_o"][head]
    return outputs


def run_layer(layer, u, v, memory, x, cfg):
    """One layer, one row: memory is the real remembered vectors [D], oldest first, x the layer's inputs [T, D]."""
    context = [*memory, *x]
    if cfg.pre_norm:
        context = [layer_norm(c, layer["ln1_scale"], layer["ln1_bias"]) for c in context]
    attended = attend(layer, u, v, context, len(x), cfg)
    outputs = []
    for t in range(len(x)):
        y = x[t] + attended[t]
        if not cfg.pre_norm:
            y = layer_norm(y, layer["ln1_scale"], layer["ln1_bias"])
        inner = layer_norm(y, layer["ln2_scale"], layer["ln2_bias"]) if cfg.pre_norm else y
        y = y + np.maximum(inner @ layer["w_1"] + layer["b_1"], 0) @ layer["w_2"] + layer["b_2"]
        outputs.append(y if cfg.pre_norm else layer_norm(y, layer["ln2_scale"], layer["ln2_bias"]))
    return np.array(outputs)


def forward(params, ids, h, fill, cfg):
    """ids [B, T], memory h [L, B, M, D] of which the last fill[b] are real -> hidden [B, T, D], new h, new fill."""
    params, h, ids, fill = as_float64(params), as_float64(h), np.asarray(ids), np.asarray(fill)
    n_mem, n_query = h.shape[2], ids.shape[1]
    hidden, new_h, new_fill = np.zeros((*ids.shape, cfg.d_model)), np.zeros_like(h), np.zeros_like(fill)
    for b in range(len(ids)):
        x = np.array([embed_token(params, word, cfg) for word in ids[b]])
        for n in range(cfg.n_layer):
            layer = {name: array[n] for name, array in params["layers"].items()}
            u, v = (params["u"][n], params["v"][n]) if cfg.untie_r else (params["u"], params["v"])  # [H, K]
            new_h[n, b] = np.concatenate([h[n, b], x])[n_query:]  # the last M of M + T
            x = run_layer(layer, u, v, h[n, b, n_mem - fill[b] :], x, cfg)
        hidden[b], new_fill[b] = x, min(n_mem, fill[b] + n_query)
    return hidden, new_h, new_fill


def cluster_logits(params, x, i, start, end, cfg):
    """Scores of words start .. end - 1, cluster i, from one hidden x [D]; the head's end with one per tail cluster."""
    table = i if cfg.div_val > 1 else 0  # with div_val == 1 one table holds all the words
    rows = slice(None) if cfg.div_val > 1 else slice(start, end)
    if cfg.div_val > 1 or cfg.d_embed != cfg.d_model:
        x = params[f"embed_proj_{table}" if cfg.tie_projs[i] else f"out_proj_{i}"] @ x
    weight = params[f"embed_{table}" if cfg.tie_weight else f"out_{table}"]
    logits = weight[rows] @ x + params[f"out_bias_{table}"][rows]
    if i == 0 and cfg.cutoffs:
        logits = np.concatenate([logits, params["cluster"] @ x + params["cluster_bias"]])
    return logits


def nats(params, hidden, targets, cfg):
    """-log p of every target, [B, T]."""
    params, hidden, targets = as_float64(params), as_float64(hidden), np.asarray(targets)
    losses = np.zeros(targets.shape)
    n_head_words = find_cluster(0, cfg)[2]
    for at in np.ndindex(targets.shape):
        i, start, end = find_cluster(targets[at], cfg)
        head = log_softmax(cluster_logits(params, hidden[at], 0, 0, n_head_words, cfg))
        losses[at] = -head[targets[at] if i == 0 else n_head_words + i - 1]
        if i > 0:
            tail = log_softmax(cluster_logits(params, hidden[at], i, start, end, cfg))
            losses[at] -= tail[targets[at] - start]
    return losses
