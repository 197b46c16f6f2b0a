"""The model: the original's numbers, an independent numpy model, memory, masks, dropout, precision, the cache."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import optax
import pytest
from conftest import load_reference, make_ids, make_mems, make_params, part, worst
from runs import fails

import txl
from data.import_checkpoint import convert

# Sizes differ pairwise: L 2, H 3, M 4, K 5, B 6, T 7, D 10, S 11, F 14, V 23.
SMALL = txl.Config(n_token=23, n_layer=2, n_head=3, d_model=10, d_head=5, d_inner=14, d_embed=10, mem_len=4)
SMALL = dataclasses.replace(SMALL, attention="dense", remat="none")  # which compile fastest
B, T = 6, 7
FILL = [0, 1, 2, 3, 4, 2]


def small(**options):
    return dataclasses.replace(SMALL, **options)


def forward_logits(params, ids, mems, cfg):
    hidden, mems = txl.forward(params, ids, mems, cfg)
    return txl.logits(params, hidden, cfg), mems


def loss_and_all(params, ids, targets, mems, cfg, key=None):
    losses, mems = txl.token_losses(params, ids, targets, mems, cfg, key=key)
    return losses.mean(), (losses, mems)


# One jit for each function; cfg is static, so that each pair of a function and a config is compiled once.
forward = jax.jit(txl.forward, static_argnames="cfg")
logits = jax.jit(forward_logits, static_argnames="cfg")
token_losses = jax.jit(txl.token_losses, static_argnames="cfg")
decode = jax.jit(txl.decode, static_argnames="cfg")
init_cache = jax.jit(txl.init_cache, static_argnames=("cfg", "batch"))
sinusoids = jax.jit(txl.sinusoidal_embedding, static_argnames="cfg")
gradients = jax.jit(jax.value_and_grad(loss_and_all, has_aux=True), static_argnames="cfg")


def in_segments(call, ids, cuts, state):
    """`call(ids of a segment, state)` -> (value [B, T, ...], state) over the cuts: all values, the last state."""
    values, start = [], 0
    for n in cuts:
        value, state = call(ids[:, start : start + n], state)
        values.append(np.asarray(value))
        start += n
    assert start == ids.shape[1]
    return np.concatenate(values, 1), state


# the original's numbers

NAMES = ["adaptive_div1_proj", "adaptive_div2", "base", "clamp_same_length"]
NAMES += ["mem_longer_than_4_segments", "mem_shorter_than_segment", "pre_norm", "untied"]
SAVING = dict(attention="chunked", attn_block=4, layer_rows=1, remat="full", loss_chunk=5)


def from_reference(name, dtype, **options):
    """(config, parameters and gradients of a fixture, its own config, its arrays)."""
    want, arrays = load_reference(name)
    state, grads = part(arrays, "param/"), part(arrays, "grad/")
    kwargs = {key: want[key] for key in ("n_head", "mem_len", "clamp_len", "same_length", "cutoffs", "div_val")}
    kwargs |= dict(layout="pytorch", pre_norm=want["pre_lnorm"])
    for old in state.keys() - grads.keys():  # tied arrays: both uses are in the gradient of the embedding's
        i = re.search(r"\d+|$", old)[0]
        tied = f"word_emb.emb_layers.{i}.weight" if "out_layers" in old else f"word_emb.emb_projs.{i}"
        grads[old] = state[old] if old == "pos_emb.inv_freq" else grads.get(tied, grads.get(tied[:-1] + "0"))
    cfg, *trees = convert(state, **kwargs) + convert(grads, **kwargs)[1:]
    params, grads = jax.tree.map(lambda a: a.astype(dtype), trees)
    return dataclasses.replace(cfg, dtype=dtype, **options), params, grads, want, arrays


def check_reference(name, tolerance, with_gradients, dtype, **options):
    cfg, params, want_grads, want, arrays = from_reference(name, dtype, **options)
    ids, mems, T = arrays["tokens"], make_mems(cfg, want["batch"]), want["tgt_len"]
    for n in range(want["segments"]):
        args = params, ids[:, n * T : n * T + T], ids[:, n * T + 1 : n * T + T + 1], mems, cfg
        if with_gradients:
            (_, (losses, mems)), grads = gradients(*args)
            assert n != want["segments"] - 2 or worst(grads, want_grads) < tolerance
        else:
            losses, mems = token_losses(*args)
        np.testing.assert_allclose(losses, arrays[f"loss/{n}"], 0, tolerance)
    assert (np.asarray(mems.fill) == cfg.mem_len).all()  # all fixtures are longer than their memory
    for n in range(cfg.n_layer):
        np.testing.assert_allclose(mems.h[n], arrays[f"mems/{n}"], 0, tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_losses_memories_and_gradients_are_the_originals_in_float64(name, x64):
    plain = dict(attention="dense", remat="none")
    check_reference(name, 1e-7, True, "float64", **plain)  # the original rounded masked scores to float32


@pytest.mark.parametrize("name", NAMES[:5])
def test_losses_and_memories_are_the_originals_in_float32_with_every_saving_on_and_the_gradients_of_one(name):
    check_reference(name, 1e-5, name == "clamp_same_length", "float32", **SAVING)


@pytest.mark.parametrize("name", ["base", "clamp_same_length"])
def test_other_lengths_in_evaluation_give_the_originals_losses_last_short_segment_included(name, x64):
    _, params, _, want, arrays = from_reference(name, "float64")
    lengths = want["eval"]
    cfg, *_ = from_reference(name, "float64", mem_len=lengths["mem_len"], clamp_len=lengths["clamp_len"])
    mems, ids, losses = make_mems(cfg, want["batch"]), arrays["tokens"], []
    for start in range(0, ids.shape[1] - 1, lengths["tgt_len"]):
        end = min(start + lengths["tgt_len"], ids.shape[1] - 1)
        loss, mems = token_losses(params, ids[:, start:end], ids[:, start + 1 : end + 1], mems, cfg)
        losses.append(loss)
    np.testing.assert_allclose(np.concatenate(losses, 1), arrays["eval_loss"], 0, 1e-7)


@pytest.mark.parametrize("name", ["base", "adaptive_div2"])
def test_a_training_run_follows_the_originals(name):
    cfg, params, _, want, arrays = from_reference(name, "float32")
    run, T = want["traj"], want["tgt_len"]
    lr = lambda step: run["lr"] * 0.5 * (1 + jnp.cos(math.pi * step / run["steps"]))
    adam = optax.adam(lr, *run["betas"], eps=run["eps"])
    optimizer = optax.chain(optax.clip_by_global_norm(run["clip"]), adam)

    @jax.jit
    def step(params, state, ids, targets, mems):
        (loss, mems), grads = jax.value_and_grad(txl.loss_fn, has_aux=True)(params, ids, targets, mems, cfg)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, mems, loss, optax.tree.norm(grads)

    ids, mems, losses, norms = arrays["traj/tokens"], make_mems(cfg, want["batch"]), [], []
    state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), jax.eval_shape(optimizer.init, params))
    for n in range(run["steps"]):
        segment, targets = ids[:, n * T : n * T + T], ids[:, n * T + 1 : n * T + T + 1]
        params, state, mems, loss, norm = step(params, state, segment, targets, mems)
        losses.append(loss)
        norms.append(norm)
    np.testing.assert_allclose(losses, arrays["traj/loss"], 0, 1e-3)  # float32 against float64 over a run of Adam
    np.testing.assert_allclose(norms, arrays["traj/grad_norm"], 0, 1e-3)
    final = dict(n_head=want["n_head"], mem_len=1, cutoffs=want["cutoffs"], div_val=want["div_val"])
    _, end = convert(part(arrays, "traj/param/"), layout="pytorch", **final)
    relative = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert max(jax.tree.leaves(jax.tree.map(relative, params, end))) < 1e-2


# the numpy model

VARIANTS = {
    "as published": small(),
    "no memory": small(mem_len=0),
    "same_length, clamp_len, pre_norm, untie_r": small(
        same_length=True, clamp_len=3, pre_norm=True, untie_r=True, tie_weight=False),
    "tables of each cluster": small(
        cutoffs=(5, 13), div_val=2, d_embed=8, tie_projs=(True, False, True), mem_len=9, untie_r=True),
    "one projected table": small(
        cutoffs=(5, 13), d_embed=8, tie_projs=(False, True, False), tie_weight=False, same_length=True, mem_len=8),
    "clusters without projections": small(cutoffs=(9,), tie_projs=(True, True), clamp_len=2),
}  # fmt: skip


@pytest.mark.parametrize("cfg", VARIANTS.values(), ids=VARIANTS.keys())
def test_hidden_states_memory_and_losses_are_those_of_the_numpy_model(cfg, x64):
    cfg = dataclasses.replace(cfg, dtype="float64")
    params, ids, targets = make_params(cfg), make_ids(cfg, B, T), make_ids(cfg, B, T, seed=3)
    mems = make_mems(cfg, B, fill=np.minimum(FILL, cfg.mem_len))

    @jax.jit
    def run(params, ids, targets, mems):
        hidden, new = txl.forward(params, ids, mems, cfg)
        return hidden, new, txl.cross_entropy(params, hidden, targets, cfg), txl.logits(params, hidden, cfg)

    hidden, new, nats, scores = run(params, ids, targets, mems)
    want, want_h, want_fill = numpy_model.forward(params, ids, mems.h, mems.fill, cfg)
    np.testing.assert_allclose(hidden, want, 0, 1e-9)  # float64 sums in another order
    np.testing.assert_array_equal(new.fill, want_fill)
    for b, n in enumerate(want_fill):
        real = slice(cfg.mem_len - n, None)
        np.testing.assert_allclose(new.h[:, b, real], want_h[:, b, real], 0, 1e-9)
    np.testing.assert_allclose(nats, numpy_model.nats(params, want, targets, cfg), 0, 1e-9)
    chosen = np.take_along_axis(np.asarray(scores), targets[..., None], 2)[..., 0]
    np.testing.assert_allclose(np.logaddexp.reduce(scores, 2) - chosen, nats, 0, 1e-9)


# what a query sees


def influence(cfg, T, fill):
    """[B, T, M + T] bool: does hidden state t change with key s? By exact zeros of the gradient for a token of ids."""
    params, batch, M = make_params(cfg), len(fill), cfg.mem_len
    ids = np.tile(np.arange(T, dtype=np.int32), (batch, 1))  # position t alone reads row t of the table
    weight = np.random.default_rng(4).standard_normal(cfg.d_model).astype(np.float32)
    mems = make_mems(cfg, batch, unwritten=0, fill=fill)
    scores = lambda table: txl.forward(params | {"embed_0": table}, ids, mems, cfg)[0] @ weight
    by_token = np.asarray(jax.jit(jax.jacrev(scores))(params["embed_0"]))[:, :, :T]
    # Memory takes no gradient: copies of each row, each with another slot changed.
    changed = mems.h.repeat(M + 1, 1)
    for s in range(M):
        changed[:, s :: M + 1, s, 0] += 3  # not all channels, which layer norm would undo
    hidden = np.asarray(forward(params, ids.repeat(M + 1, 0), txl.Mems(changed, mems.fill.repeat(M + 1)), cfg)[0])
    hidden = hidden.reshape(batch, M + 1, T, -1)
    by_memory = np.abs(hidden[:, :M] - hidden[:, M:]).max(3) > 1e-5  # rounding may differ between rows
    return np.concatenate([by_memory.swapaxes(1, 2), (by_token != 0).any(3)], 2)


@pytest.mark.invariant
@pytest.mark.parametrize(
    "cfg",
    [
        small(n_layer=1, same_length=True, attention="chunked", attn_block=3),
        small(pre_norm=True, untie_r=True),
        small(attention="chunked", attn_block=2, reset_on=3),
    ],
    ids=["same_length", "two layers", "documents"],
)
def test_a_query_is_reached_by_exactly_the_visible_keys_and_no_later_one(cfg):
    fill = np.array([0, 2, 4])
    query, key = np.arange(T)[:, None] + cfg.mem_len, np.arange(cfg.mem_len + T)
    want = (key <= query) & (key >= (cfg.mem_len - fill)[:, None, None])
    if cfg.same_length:
        want &= key >= query - cfg.mem_len
    if cfg.reset_on >= 0:  # the id at that position starts a document
        want &= (query < cfg.mem_len + cfg.reset_on) | (key >= cfg.mem_len + cfg.reset_on)
    np.testing.assert_array_equal(influence(cfg, T, fill), want)


def attention_inputs(T, M, kv_start, dtype=np.float32, seed=5):
    rng, (batch, H, K, S) = np.random.default_rng(seed), (len(kv_start), 3, 5, M + T)
    shapes = [(batch, H, T, K)] * 2 + [(batch, H, S, K)] * 2 + [(H, S, K)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients():
    kv_start = np.array([[9, 9, 9, 9, 9], [0, 4, 5, 5, 8]], np.int32)  # M 3: query t's own key is t + 3
    args = attention_inputs(5, 3, kv_start)

    @jax.jit
    def run(args):
        out, pull = jax.vjp(lambda *args: txl.attention(*args, kv_start, block=2), *args)
        return out, pull(out + 1)

    out, grads = run(args)
    assert (np.asarray(out)[0] == 0).all() and (np.asarray(out)[1, :, 4] == 0).all()
    assert (np.asarray(out)[1, :, :4] != 0).all()
    assert all(np.isfinite(grad).all() for grad in grads)
    assert all((np.asarray(grad)[0] == 0).all() for grad in grads[:4])


# memory


@pytest.mark.invariant
def test_only_with_same_length_logits_do_not_depend_on_the_cuts():
    def run(n, same_length):
        cfg = small(mem_len=5, same_length=same_length)
        call = lambda ids, mems: logits(make_params(cfg), ids, mems, cfg)
        return in_segments(call, make_ids(cfg, 3, 30), [n] * (30 // n), make_mems(cfg, 3))[0]

    uncut = run(30, True)
    for n in (1, 3, 10):
        np.testing.assert_allclose(run(n, True), uncut, 0, 1e-5, err_msg=str(n))
    assert np.abs(run(10, False) - run(30, False)).max() > 1e-2


def test_what_stands_in_unwritten_memory_changes_no_bit():
    params, ids, targets = make_params(SMALL), make_ids(SMALL, B, T), make_ids(SMALL, B, T, seed=3)
    found = [gradients(params, ids, targets, make_mems(SMALL, B, value, FILL), SMALL) for value in (0, 1e3, np.nan)]
    assert worst(found[1], found[0]) == worst(found[2], found[0]) == 0 and np.isfinite(found[0][0][0])


@pytest.mark.invariant
def test_no_gradient_goes_through_memory():
    cfg = small(tie_weight=False, mem_len=8)
    params, ids = make_params(cfg), make_ids(cfg, B, 2 * T) % 11
    ids[:, T:] += 11  # the segments share no token
    targets = make_ids(cfg, B, T, seed=3)

    @jax.jit
    def two_segments(params, first):
        def loss(table):
            _, mems = txl.forward(params | {"embed_0": table}, first, make_mems(cfg, B), cfg)
            return txl.loss_fn(params | {"embed_0": table}, ids[:, T:], targets, mems, cfg)[0]

        return jax.value_and_grad(loss)(params["embed_0"])

    loss, grad = two_segments(params, ids[:, :T])
    assert (np.asarray(grad)[:11] == 0).all() and (np.asarray(grad)[11:22] != 0).any()
    assert abs(two_segments(params, ids[:, T - 1 :: -1])[0] - loss) > 1e-3  # though the loss depends on it


# documents

SEP = 22  # the last id of 23


@pytest.mark.parametrize("same_length, attention", [(False, "dense"), (True, "chunked")])
def test_nothing_is_attended_across_a_separator_in_the_segment_and_in_memory(same_length, attention):
    cuts = 2, 7, 11, 15  # in the first segment, at its end, in the second one, at the end of all
    one, two = (np.random.default_rng(seed).integers(0, SEP, (4, 16), dtype=np.int32) for seed in (3, 4))
    one[range(4), cuts] = SEP
    two = np.where(np.arange(16) >= np.array(cuts)[:, None], one, two)  # other before the separator
    for reset_on in (SEP, -1):
        cfg = small(reset_on=reset_on, same_length=same_length, attention=attention, attn_block=3, mem_len=9)
        call = lambda ids, mems, cfg=cfg: forward(make_params(cfg), ids, mems, cfg)
        (a, mems), (b, _) = (in_segments(call, ids, (8, 8), make_mems(cfg, 4)) for ids in (one, two))
        for row in range(4):
            differ = np.abs(a[row] - b[row]).max(-1) > 1e-5
            assert differ[: cuts[row]].all() and differ[cuts[row] :].any() == (reset_on < 0), (row, reset_on)
        if reset_on == SEP:
            assert np.asarray(mems.fill).tolist() == [9, 9, 5, 1]
            alone, _ = in_segments(call, np.roll(one, -2, 1), (8, 8), make_mems(cfg, 4))  # no document before it
            np.testing.assert_allclose(a[0, 2:], alone[0, :14], 0, 1e-5)


# options that change bytes and no result


@pytest.mark.invariant
def test_options_for_memory_change_no_loss_gradient_or_memory_with_dropout_on():
    cfg = small(dropout=0.2, dropatt=0.3, same_length=True, attention="dense")
    params, ids, targets = make_params(cfg), make_ids(cfg, B, T), make_ids(cfg, B, T, seed=3)
    args = params, ids, targets, make_mems(cfg, B, fill=FILL)
    key = jax.random.split(jax.random.key(7), B)
    want = gradients(*args, cfg, key)
    for options in (
        dict(remat="dots", attention="chunked", attn_block=3, layer_rows=2, loss_chunk=5),
        dict(remat="full", attention="chunked", attn_block=4, layer_rows=1, loss_chunk=41),
    ):
        got = gradients(*args, dataclasses.replace(cfg, **options), key)
        assert worst(got, want) < 1e-5, options  # sums of float32 in another order


def training_program(cfg, T):
    """The text of the loss and its gradients before XLA, from shapes alone."""
    mems, ids = jax.eval_shape(lambda: txl.init_mems(cfg, B)), jax.ShapeDtypeStruct((B, T), jnp.int32)
    run = jax.value_and_grad(lambda *args: txl.loss_fn(*args, cfg), has_aux=True)
    return str(jax.make_jaxpr(run)(txl.param_shapes(cfg), ids, ids, mems))


def shapes_in(text):
    return {tuple(map(int, shape.split(","))) for shape in re.findall(r"\[(\d+(?:,\d+)+)\]", text)}


def test_chunked_attention_never_holds_the_scores_of_all_queries():
    T, S = 48, SMALL.mem_len + 48
    # Keys are up to 3 more in a block: two that pad T to whole blocks and the extra row of positions.
    keyed = lambda text: [math.prod(shape) for shape in shapes_in(text) if set(shape) & set(range(S, S + 4))]
    assert max(keyed(training_program(SMALL, T))) >= B * 3 * T * S  # the check sees them where they are
    for remat in ("none", "full"):
        chunked = small(attention="chunked", attn_block=5, layer_rows=1, remat=remat)
        assert max(keyed(training_program(chunked, T))) < 3 * T * S


def test_the_program_does_not_grow_with_depth():
    size = lambda n_layer: training_program(small(n_layer=n_layer, remat="full"), T).count(" = ")
    assert size(2) == size(24)


@pytest.mark.parametrize("cutoffs, chunk", [((), 11), ((300,), 32)])  # 210 tokens: no chunk divides them
def test_the_loss_in_chunks_is_the_same_and_never_holds_all_logits(cutoffs, chunk):
    cfg = small(n_token=1009, cutoffs=cutoffs)
    params, hidden = make_params(cfg), np.random.default_rng(8).standard_normal((3, 70, 10)).astype(np.float32)
    targets = make_ids(cfg, 3, 70)

    def run(cfg):
        loss = lambda params, hidden: txl.cross_entropy(params, hidden, targets, cfg).mean()
        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(params, hidden).compile()
        return program(params, hidden), max(map(math.prod, shapes_in(program.as_text())))

    want, size = run(cfg)
    assert size >= 210 * 700  # the check sees them where they are
    got, size = run(dataclasses.replace(cfg, loss_chunk=chunk))
    assert size <= max(chunk * 1009, 1009 * 10)
    assert worst(got, want) < 1e-5


# dropout


@pytest.mark.invariant
def test_dropout_belongs_to_the_row_and_not_to_its_place_in_the_batch():
    cfg = small(dropout=0.3, dropatt=0.4)
    params, ids, mems = make_params(cfg), make_ids(cfg, B, T), make_mems(cfg, B, fill=FILL)
    key = jax.random.split(jax.random.key(9), B)
    hidden, new = forward(params, ids, mems, cfg, key=key)
    rows = slice(2, 4)
    part_of = txl.Mems(mems.h[:, rows], mems.fill[rows])
    got, got_new = forward(params, ids[rows], part_of, cfg, key=key[rows])
    np.testing.assert_allclose(got, hidden[rows], 1e-6, 1e-6)  # programs of 6 and of 2 rows round apart
    np.testing.assert_allclose(got_new.h, new.h[:, rows], 0, 1e-6)
    same_everything = np.asarray(forward(params, ids[[0] * B], make_mems(cfg, B), cfg, key=key)[0])
    pairs = [(a, b) for a in range(B) for b in range(a)]
    assert all(np.abs(same_everything[a] - same_everything[b]).max() > 1e-2 for a, b in pairs)


def test_without_a_key_nothing_is_dropped():
    args = make_params(SMALL), make_ids(SMALL, B, T), make_mems(SMALL, B)
    program = lambda cfg: str(jax.make_jaxpr(partial(txl.forward, cfg=cfg))(*args))
    assert program(small(dropout=0.3, dropatt=0.4)) == program(SMALL)


CHANCE = 0.3**2 + 0.7**2  # how often two masks of a rate of 0.3 agree


def test_dropout_drops_its_rate_and_scales_the_others():
    key = jax.random.split(jax.random.key(10), 5)
    drop = jax.jit(lambda key, layer, site: txl.dropout(jnp.ones((5, 40, 50)), key, layer, site, small(dropout=0.3)))
    masks = np.stack([drop(key, layer, site) for layer in range(3) for site in range(4)])
    assert set(np.unique(masks)) == {0, np.float32(1 / 0.7)}
    kept = (masks != 0).reshape(60, -1)
    assert abs(kept.mean() - 0.7) < 3 * math.sqrt(0.3 * 0.7 / kept.size)  # 3 sigma
    # Masks of rows, layers and places agree no more often than chance has it: 5 sigma, since there are 1,770 pairs.
    agree = np.array([(kept[a] == kept[b]).mean() for a in range(60) for b in range(a)])
    assert np.abs(agree - CHANCE).max() < 5 * math.sqrt(CHANCE * (1 - CHANCE) / kept.shape[1])


def test_dropout_falls_on_embeddings_both_sublayers_the_inner_units_and_the_output(monkeypatch):
    dropout, found, cfg = txl.dropout, set(), small(n_layer=1, dropout=0.3)

    def watched(x, key, layer_index, dropout_site, cfg):
        found.add((dropout_site, x.shape[-1], layer_index is cfg.n_layer))
        return dropout(x, key, layer_index, dropout_site, cfg)

    monkeypatch.setattr(txl, "dropout", watched)
    run = lambda params, key: txl.forward(params, make_ids(cfg, B, T), make_mems(cfg, B), cfg, key=key)
    jax.eval_shape(run, make_params(cfg), jax.random.split(jax.random.key(15), B))
    in_layers = {(1, cfg.d_model, False), (2, cfg.d_inner, False), (3, cfg.d_model, False)}
    assert found == {(0, cfg.d_model, True), (1, cfg.d_model, True)} | in_layers


def test_attention_dropout_drops_its_rate_by_head_query_and_key():
    batch, H, T, S = 4, 3, 60, 60
    seeds = np.array([[55, 9], [55, 7], [3, 7], [3, 1 << 31]], np.uint32)  # neighbours share one of two words
    nothing, values = np.zeros((batch, H, T, S), np.float32), np.tile(np.eye(S, dtype=np.float32), (batch, H, 1, 1))
    run = jax.jit(lambda kv_start: txl.attention(
        nothing, nothing, nothing, values, nothing[0], kv_start, block=13, drop=(seeds, 0.3)
    ))  # fmt: skip
    weights = np.asarray(run(np.zeros((batch, T), np.int32))) * np.arange(1, T + 1)[:, None]  # even: 1 or dropped
    seen = np.broadcast_to(np.tri(T, dtype=bool), weights.shape)
    assert (weights[~seen] == 0).all()
    np.testing.assert_allclose(np.unique(weights[seen].round(4)), [0, round(1 / 0.7, 4)], 1e-4)
    kept = weights != 0
    assert abs(kept[seen].mean() - 0.7) < 3 * math.sqrt(0.3 * 0.7 / seen.sum())
    last = kept[:, :, T // 2 :, : T // 2]  # queries that all see these keys
    for axis in (0, 1, 2, 3):  # neighbours along each axis agree by chance
        one, other = (np.take(last, range(i, last.shape[axis] - 1 + i), axis) for i in (0, 1))
        assert abs((one == other).mean() - CHANCE) < 5 * math.sqrt(CHANCE * (1 - CHANCE) / one.size)


# precision


def test_positions_in_bfloat16_are_counted_wide_and_rounded_once():
    distances, sizes = np.arange(1600), dict(d_model=64, d_embed=64)
    table32, table16 = (sinusoids(distances, small(dtype=dtype, **sizes)) for dtype in ("float32", "bfloat16"))
    assert table16.dtype == jnp.bfloat16
    np.testing.assert_array_equal(table16, table32.astype(jnp.bfloat16))
    assert len(np.unique(np.asarray(table16).astype(np.float32), axis=0)) == 1600
    want = np.stack([numpy_model.sinusoid(distance, small(**sizes)) for distance in distances])
    np.testing.assert_allclose(table32, want, 0, 1600 * 2e-7)  # an angle's relative rounding, at the largest angle


def test_bfloat16_computes_and_remembers_in_bfloat16_and_keeps_losses_and_masters_wide():
    cfg = small(dtype="bfloat16")
    args = make_params(cfg), make_ids(cfg, B, T), make_ids(cfg, B, T, seed=3), make_mems(cfg, B, fill=FILL)
    (loss, _), grads = jax.eval_shape(lambda *args: gradients(*args, cfg), *args)
    assert {a.dtype.name for a in (loss, *jax.tree.leaves(grads))} == {"float32"}
    hidden, _ = jax.eval_shape(lambda params, ids, _, mems: forward(params, ids, mems, cfg), *args)
    losses, mems = token_losses(*args, cfg)
    assert losses.dtype == jnp.float32 and hidden.dtype == mems.h.dtype == jnp.bfloat16
    (_, (want, want_mems)), _ = gradients(*args[:3], make_mems(SMALL, B, fill=FILL), SMALL)
    # 8 bits of mantissa: a relative error of 1/256 a rounding, some ten of them one after another.
    np.testing.assert_allclose(losses, want, 0, 10 / 256 * np.abs(want).max())
    np.testing.assert_allclose(np.asarray(mems.h, np.float32), want_mems.h, 0, 10 / 256 * np.abs(want_mems.h).max())


# config and parameters


def test_initial_parameters_are_normal_with_deviation_0_02_and_an_untrained_model_loses_about_ln_v():
    cfg = small(n_token=500, d_inner=90, d_embed=8)
    params, ids = jax.jit(txl.init_params, static_argnums=1)(jax.random.key(14), cfg), make_ids(cfg, B, 31)
    flat = {name: np.asarray(a).ravel() for name, a in (params | params["layers"]).items() if name != "layers"}
    constant = {"ln1_scale": 1, "ln2_scale": 1} | dict.fromkeys(["b_1", "b_2", "ln1_bias", "ln2_bias", "out_bias_0"], 0)
    assert {name: a[0] for name, a in flat.items() if (a == a[0]).all()} == constant
    drawn = {name: a for name, a in flat.items() if name not in constant}
    for name, a in drawn.items():
        assert abs(a.std() / 0.02 - 1) < 4 / math.sqrt(2 * a.size), name  # 4 sigma of a deviation
    assert len({a[0] for a in drawn.values()}) == len(drawn)  # each array has a key of its own
    nats = token_losses(params, ids[:, :-1], ids[:, 1:], make_mems(cfg, B), cfg)[0]
    assert abs(np.mean(nats) - math.log(500)) < 0.05


IMPOSSIBLE = [
    ("n_layer", 0), ("n_layer", 2.0), ("n_layer", True), ("n_head", -1), ("mem_len", -1), ("d_model", 7),
    ("dropout", 1), ("dropout", math.nan), ("dropout", "0.1"), ("cutoffs", (9, 5)), ("cutoffs", (23,)), ("cutoffs", 5),
    ("tie_projs", (True, True)), ("clamp_len", -2), ("same_length", 1), ("dtype", "float16"), ("remat", "some"),
    ("reset_on", 23), ("div_val", 4),  # 4 leaves the last cluster no width
]  # fmt: skip


@pytest.mark.parametrize("field, value", IMPOSSIBLE, ids=[f"{f}={v!r}" for f, v in IMPOSSIBLE])
def test_an_impossible_value_is_refused_in_one_line_that_names_its_field(field, value):
    fails(lambda: small(**{"cutoffs": (5, 9), field: value}), f"{field}=")


# the cache

CACHED = {
    "plain": small(n_layer=1, mem_len=3, attn_block=2, attention="chunked"),
    "untied, a long memory": small(mem_len=12, untie_r=True, clamp_len=9),
    "same_length": small(mem_len=7, same_length=True, clamp_len=3, attention="chunked", attn_block=3, layer_rows=1),
    "documents, mem_len 1": small(mem_len=1, reset_on=7, pre_norm=True, cutoffs=(5, 13), d_embed=8),
    "no memory": small(mem_len=0, same_length=True, cutoffs=(5, 13), div_val=2, d_embed=8),
}
CUTS = [1, 5, 1, 1, 5, 5, *[1] * 14, 5]  # longer than a memory and shorter, and once round the longest ring


@pytest.mark.invariant
@pytest.mark.parametrize("cfg", CACHED.values(), ids=CACHED.keys())
def test_a_cache_gives_the_logits_of_forward_at_any_cut(cfg):
    params, ids = make_params(cfg), make_ids(cfg, 4, sum(CUTS))
    cache = init_cache(params, cfg, 4)
    want, mems = in_segments(lambda ids, mems: logits(params, ids, mems, cfg), ids, CUTS, make_mems(cfg, 4))
    got, after = in_segments(lambda ids, cache: decode(params, ids, cache, cfg), ids, CUTS, cache)
    np.testing.assert_allclose(got, want, 0, 1e-4)  # float32: sums in another order
    np.testing.assert_array_equal(after.length, mems.fill)
    kind = lambda a: (a.shape, a.dtype, a.weak_type)
    assert jax.tree.map(kind, after) == jax.tree.map(kind, cache)
