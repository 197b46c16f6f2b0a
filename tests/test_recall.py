"""What memory is for: a model trained for seconds answers from further back than a segment, and only with memory."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np

import train
import txl

LETTERS, DIGITS = 4, 4
QUESTION, FACT = 1, 1 + LETTERS  # ids: 0 between, a question for each letter, a fact for each letter and digit
N_TOKEN = FACT + LETTERS * DIGITS
CFG = txl.Config(n_token=N_TOKEN, n_layer=1, n_head=2, d_model=32, d_head=16, d_inner=24, mem_len=36)
RUN = train.TrainConfig(steps=160, batch=16, tgt_len=18, lr=3e-2, warmup=10)


def make_text(seed, n):
    """ids of n facts, each followed by its question and answer 2 to 36 ids later; answers' places, their distances."""
    rng = np.random.default_rng(seed)
    letters, digits, distances = np.arange(n) % LETTERS, rng.integers(0, DIGITS, n), rng.integers(2, 37, n)
    facts, answers = FACT + letters * DIGITS + digits, np.cumsum(distances + 1) - 1
    ids = np.zeros(-(-(answers[-1] + 1) // RUN.tgt_len) * RUN.tgt_len, np.int32)
    ids[answers - 1] = QUESTION + letters
    ids[answers], ids[answers - distances] = facts, facts
    return ids, answers, distances


def trained():
    layout = train.make_layout(CFG, RUN, 1)
    step, state = train.compile_train_step(CFG, RUN, layout), train.fresh_state(CFG, RUN, layout, None)
    text = make_text(0, 2500)[0]
    for i in range(RUN.steps):
        batch = train.get_batch(text, RUN.batch, i * RUN.tgt_len, RUN.tgt_len)
        state, _ = step(state, *train.split_rows(batch, 1), np.int32(i))
    return state.params


def predict(params, ids, cfg):
    """The most likely id after each of ids, read in segments."""
    read, cache, predicted = jax.jit(partial(txl.decode, cfg=cfg)), txl.init_cache(params, cfg, 1), []
    for segment in ids.reshape(-1, 1, RUN.tgt_len):
        scores, cache = read(params, segment, cache)
        predicted.append(np.asarray(scores[0].argmax(-1)))
    return np.concatenate(predicted)


def test_a_question_about_what_stands_before_the_segment_is_answered_right_with_memory_and_not_without():
    params = trained()
    ids, answers, distances = make_text(1, 200)
    beyond = answers[distances > RUN.tgt_len]
    right = {n: (predict(params, ids, replace(CFG, mem_len=n))[beyond - 1] == ids[beyond]).mean() for n in (36, 0)}
    assert len(beyond) > 80 and right[36] > 0.95
    assert right[0] < 0.45  # knowing the letter alone gives 1 / 4; this is four standard errors more
