"""A training run through `train.main`: what it computes, logs, saves, refuses, and how it goes on."""

import json
import math
import signal
import warnings
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import make_params
from runs import COMPILED, NOISY, TEXT, TINY, call, log, losses, raw, refused, save_model, saved_run, spy, stopped

import sample
import train
import txl
from data import checkpoint, prepare, tokenizer

pytestmark = pytest.mark.usefixtures("shared_steps")
STEPS = 60
TRAIN = np.frombuffer(TEXT[: len(TEXT) * 9 // 10], np.uint8)
BASE = NOISY | dict(steps=STEPS, eval_every=20)


@pytest.fixture(scope="module")
def base(tmp_path_factory, text, shared_steps):
    """A run of 60 steps with three evaluations, the last batch of each a partial one; what it did is in its fields."""
    folder = tmp_path_factory.mktemp("base") / "run"
    seen = SimpleNamespace(folder=folder, compiled_by={"step": [], "eval": []}, batches=[], fill=[], alive=[])

    def counted(name, function, args):
        before = len(COMPILED)
        out = function(*args)
        seen.compiled_by[name].append(len(COMPILED) - before)
        return out

    def step(function, args):
        out = counted("step", function, args)
        seen.batches.append([np.asarray(a).reshape(-1, a.shape[-1]) for a in args[1:3]])
        seen.alive += [not a.is_deleted() for a in jax.tree.leaves(args[0])]
        seen.fill.append(np.array(out[0].mems.fill)[0])
        return out

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spy(patch, "compile_train_step", step)
        spy(patch, "make_eval_step", partial(counted, "eval"))
        seen.outcome = call(train.main, data=text, out=folder, **BASE)
    assert seen.outcome.code is None, seen.outcome
    seen.warnings = [str(w.message) for w in caught]
    return seen


def folder_of(path, **splits):
    path.mkdir(exist_ok=True)
    for name, data in (dict(train=TEXT, valid=TEXT[:300], test=TEXT[300:500]) | splits).items():
        (path / f"{name}.txt").write_bytes(data)
    return path


def test_row_b_of_a_step_goes_on_where_row_b_of_the_step_before_ended(base):
    assert len(base.batches) == STEPS
    starts = np.arange(TINY["batch"]) * ((len(TRAIN) - 1) // TINY["batch"])
    ids, targets = (np.concatenate(part, 1) for part in zip(*base.batches))
    for row, following, start in zip(ids, targets, starts):
        assert (row == TRAIN[start : start + len(row)]).all()
        assert (following == TRAIN[start + 1 : start + 1 + len(row)]).all()


def test_streams_wrap_at_the_end_of_the_text_and_every_row_reads_all_of_it():
    tokens = np.arange(31)  # 30 targets, rows of 10
    read = [train.get_batch(tokens, 3, cursor, 4) for cursor in range(0, 32, 4)]
    for b in range(3):
        ids = np.concatenate([batch[0][b] for batch in read])
        assert (ids == (10 * b + np.arange(32)) % 30).all()
        assert (np.concatenate([batch[1][b] for batch in read]) == ids + 1).all()


@pytest.mark.parametrize("rows", [1, 2, 7, 30])
@pytest.mark.parametrize("T", [1, 4, 50])
def test_an_evaluation_reads_every_target_once_in_rows_of_nearly_equal_length(rows, T):
    tokens = np.arange(100, 131)  # 30 targets, each with an id of its own
    batches = list(train.eval_batches(tokens, rows, T))
    ids, targets, weights = (np.concatenate(a, 1) for a in zip(*batches))
    assert {batch[0].shape for batch in batches} == {(rows, T)}
    assert sorted(targets[weights]) == list(range(101, 131)) and (ids + 1 == targets)[weights].all()
    assert np.ptp(weights.sum(1)) <= 1
    assert (np.diff(ids, axis=1)[weights[:, 1:]] == 1).all()  # a row is one piece of the text


def test_each_program_is_compiled_once_over_60_steps_with_evaluations_and_a_partial_tail(base):
    assert base.compiled_by["step"] == [0] * STEPS  # compiled before the first
    first, *others = base.compiled_by["eval"]
    assert first <= 1 and not any(others) and len(others) > 3 * 4
    assert any(entry["targets"] % (TINY["eval_batch"] * TINY["tgt_len"]) for entry in log(base.folder)[2])


def test_a_run_raises_no_warning_and_donated_state_is_gone_after_a_step(base):
    assert base.warnings == []
    assert len(base.alive) > 40 * STEPS and not any(base.alive)


def test_each_step_empties_the_memory_of_a_share_of_the_rows(base):
    first, *fill = base.fill
    assert set(first) == {8} and {*np.concatenate(fill)} == {8, 9}  # 8: of this step alone
    assert 0.04 < (np.array(fill) == 8).mean() < 0.2  # mem_reset is 0.1 of 236


@pytest.mark.invariant
def test_losses_do_not_depend_on_devices_or_on_parts_of_the_batch_with_dropout_on(base, tmp_path, text):
    stopped(11, data=text, out=tmp_path / "run", **BASE | {"devices": 2, "batch_chunk": 2})
    head, steps, _ = log(tmp_path / "run")
    assert head["n_devices"] == 2 and len(steps) == 11
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(base.folder)[:11], atol=1e-5)  # other order of sums


@pytest.mark.parametrize(
    "schedule, lr_min, want",  # at 0, 1, 3, 4, 10, 19, 20 steps done, of 20 with 4 of warm-up
    [
        ("linear", 0.0, [0.25, 0.5, 1, 1, 10 / 16, 1 / 16, 0]),
        ("linear", 0.1, [0.25, 0.5, 1, 1, 0.1 + 0.9 * 10 / 16, 0.1 + 0.9 / 16, 0.1]),
        ("cosine", 0.0, [0.25, 0.5, 1, 1, 0.5 + 0.5 * math.cos(math.pi * 6 / 16), 0.009607, 0]),
        ("inv_sqrt", 0.0, [0.25, 0.5, 1, math.sqrt(4 / 5), math.sqrt(4 / 11), math.sqrt(4 / 20), math.sqrt(4 / 21)]),
        ("constant", 0.0, [0.25, 0.5, 1, 1, 1, 1, 1]),
    ],
)
def test_a_schedule_warms_up_and_then_has_its_shape(schedule, lr_min, want):
    lr = train.make_schedule(train.TrainConfig(schedule=schedule, lr_min=lr_min, lr=2e-3, warmup=4, steps=20))
    np.testing.assert_allclose([lr(s) for s in (0, 1, 3, 4, 10, 19, 20)], 2e-3 * np.array(want), rtol=1e-4, atol=1e-9)


def test_the_log_has_a_header_then_steps_then_evaluations_as_documented(base):
    head, steps, evals = log(base.folder)
    assert {"versions", "backend", "device", "n_devices", "config", "run", "corpus", "n_params"} <= head.keys()
    assert head["versions"]["jax"] == jax.__version__ and head["backend"] == "cpu" and head["n_devices"] == 1
    assert head["attention"] == "dense" and head["plan"]["total_mib"] > 0
    assert (base.folder / "loss.png").exists() or "no picture: " in base.outcome.err
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    for entry in steps:
        assert {"loss_nats", "bpb", "grad_norm", "lr", "tok_per_s", "step_ms", "mem_mib"} <= entry.keys()
        assert entry["bpb"] == pytest.approx(entry["loss_nats"] / math.log(2))  # a byte is a token here
        assert entry["grad_norm"] > 0 and entry["mem_mib"] > 10
    assert steps[-1]["loss_nats"] < steps[0]["loss_nats"] - 1
    corpus = prepare.load(head["corpus"]["source"])
    assert head["corpus"]["sha256"] == corpus.sha256
    whole = [(STEPS, split, len(getattr(corpus, split)) - 1) for split in ("valid", "test")]
    some = [(step, "valid", TINY["eval_tokens"]) for step in (20, 40, 60)]
    assert [(e["step"], e["split"], e["targets"]) for e in evals] == some + whole
    assert base.outcome.entries() == steps[:20] + evals[:1] + steps[20:40] + evals[1:2] + steps[40:] + evals[2:]
    for word in (f"jax {jax.__version__}", "cpu", str(base.folder), "text.txt", "vocabulary 256"):
        assert word in base.outcome.err


@pytest.fixture(scope="module")
def one_txt(tmp_path_factory):
    """A prepared corpus whose valid split has 1,003 bytes."""
    folder = folder_of(tmp_path_factory.mktemp("one"), valid=TEXT[2000:3003])
    prepare.prepare([folder], folder / "tokens")
    return folder / "tokens"


def judge(base, one_txt, **flags):
    return call(train.main, "--eval_only", json=True, **dict(run=base.folder, data=one_txt, devices=1) | flags)


def evaluated(base, one_txt, **flags):
    outcome = judge(base, one_txt, **flags)
    assert outcome.code is None, outcome
    return outcome.entries()[0]


def test_an_evaluation_counts_all_1002_targets_of_1003_bytes_at_any_batch_size_and_number_of_devices(base, one_txt):
    cases = (dict(eval_batch=1, tgt_len=6), {}, dict(devices=4, batch=5))
    one, three, spread = found = [evaluated(base, one_txt, **flags) for flags in cases]
    assert {(e["targets"], e["split"]) for e in found} == {(1002, "valid")}
    cfg, params, *_ = checkpoint.load(base.folder)
    tokens, mems = np.frombuffer(TEXT[2000:3003], np.uint8).astype(np.int32)[None], txl.init_mems(cfg, 1)
    losses_of, nats = jax.jit(txl.token_losses, static_argnames="cfg"), []
    for at in range(0, 1002, 6):
        some, mems = losses_of(params, tokens[:, at : at + 6], tokens[:, at + 1 : at + 7], mems, cfg)
        nats.extend(np.asarray(some[0], np.float64))
    assert one["loss_nats"] == pytest.approx(np.mean(nats), abs=1e-5)  # the sum of all over their number
    assert one["bpb"] == pytest.approx(one["loss_nats"] / math.log(2))
    assert three["loss_nats"] == pytest.approx(one["loss_nats"], abs=0.2)  # cold starts make a small difference
    assert spread["loss_nats"] == pytest.approx(three["loss_nats"], abs=1e-6)  # a batch of training need not divide


def test_memory_lengths_are_evaluated_one_after_the_other_and_documents_apart_where_asked(base, one_txt):
    run = judge(base, one_txt, mem_len="0,9")
    assert run.code is None, run
    without, whole = run.entries()
    assert (without["mem_len"], whole["mem_len"]) == (0, 9) and whole == evaluated(base, one_txt)
    assert without["loss_nats"] != whole["loss_nats"]
    assert f"{base.folder / 'best.npz'}, step 60" in run.err and "1,003 valid tokens" in run.err
    assert "another text than the one that this run was trained on" in run.err
    assert 0 < abs(evaluated(base, one_txt, reset_on="\n")["loss_nats"] - whole["loss_nats"]) < 0.5


def test_what_no_evaluation_can_do_ends_in_one_line(base, one_txt, tmp_path):
    for flags, *words in (
        (dict(mem_len=10**9, eval_batch=1002), "out of memory", "--eval_batch", "--mem_len", "--dtype bfloat16"),
        (dict(mem_len=2**31 - 1), f"mem_len={2**31 - 1}", "tgt_len=8", "less than 2**31 together"),
        (dict(data=folder_of(tmp_path / "short", test=b"x"), split="test"), "test split", "1 tokens"),
        (dict(resume="x"), "resume=x", "--eval_only", "--run"),
        (dict(plan=True), "plan=True", "--eval_only", "--run"),
    ):
        refused(judge(base, one_txt, **flags), *words)
    refused(call(train.main, data=one_txt, mem_len="0,9"), "mem_len=(0, 9)", "--eval_only")


@pytest.fixture(scope="module")
def abc(tmp_path_factory):
    """A run on abcabc..., 200 steps; characters, the next checkpoint in the folder runs."""
    place = tmp_path_factory.mktemp("abc")
    (place / "abc.txt").write_bytes(b"abc" * 2000)
    flags = TINY | dict(steps=200, lr=2e-2, clip=1, schedule="cosine", log_every=50, eval_every=100, tokenizer="char")
    flags |= dict(n_layer=1, json=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return place, flags, call(train.main, data="abc.txt", **flags)


def test_200_steps_on_abcabc_learn_that_b_follows_a_and_the_newest_run_says_so(abc, monkeypatch):
    place, _, outcome = abc
    monkeypatch.chdir(place)
    assert outcome.code is None
    assert all(entry["loss_nats"] < 0.01 for entry in outcome.entries()[-4:])  # the last step, evaluations
    assert call(sample.main, prompt="abca", n_tokens=20, temperature=0).out == "abcabcabcabcabcabcabcabc\n"
    assert call(sample.main, prompt="a", n_tokens=5, temperature=0).out == "abcabc\n"  # from empty memory, too


def test_init_goes_on_from_weights_with_their_vocabulary_on_other_data_that_it_knows(abc, tmp_path, monkeypatch):
    place, flags, _ = abc
    (tmp_path / "other.txt").write_bytes(b"bca" * 300 + b"b" * 30)  # the last part has one symbol only
    (tmp_path / "d.txt").write_bytes(b"abcd" * 300)
    monkeypatch.chdir(place)
    outcome = stopped(1, data=tmp_path / "other.txt", out=tmp_path / "run", init="runs/abc-1", **flags)
    assert outcome.code == 130, outcome
    meta, arrays = raw(tmp_path / "run" / "last.npz")
    assert meta["vocab"] == {"kind": "char", "symbols": ["a", "b", "c"]} and meta["config"]["n_token"] == 3
    assert meta["run"]["step"] == 1 and arrays["opt/1/count"] == 1
    assert losses(tmp_path / "run")[0] < 0.3 < math.log(3)  # a cold start among what was learnt
    refused(call(train.main, data=tmp_path / "d.txt", init="runs/abc-1"), "'d'", "train split", "character index 3")


def test_best_stays_the_evaluation_with_the_lowest_loss_also_after_a_resume_and_last_is_the_last(tmp_path):
    noise = np.random.default_rng(4).integers(0, 256, 300, np.uint8).tobytes()  # the better trained, the worse
    stopped(45, data=folder_of(tmp_path / "data", valid=noise), out=tmp_path / "run", **BASE)
    assert call(train.main, resume=tmp_path / "run", devices=1, json=True).code is None
    entries = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    found = {e["step"]: e["loss_nats"] for e in entries if e.get("split") == "valid" and e["targets"] == 100}
    assert found[20] < found[40] < found[60]
    best, last = (saved_run(tmp_path / "run", name) for name in ("best.npz", "last.npz"))
    assert (best["step"], last["step"]) == (20, 60) and best["best"] == last["best"] == found[20]


@pytest.mark.invariant
def test_a_run_interrupted_at_step_25_and_resumed_is_the_whole_run_bit_for_bit_with_dropout_on(base, tmp_path, text):
    folder = tmp_path / "run"
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    first = stopped(25, data=text, out=folder, **BASE)
    assert first.code == 130 and saved_run(folder)["step"] == 25
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert first.err.splitlines()[-1] == f"stopped at step 25: go on with python train.py --resume {folder}"
    second = call(train.main, resume=folder, devices=1, json=True)
    assert second.code is None, second
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [e for e in entries if "loss_nats" in e and "split" not in e]
    for key in ("step", "loss_nats", "lr", "grad_norm"):
        assert [e[key] for e in steps] == [e[key] for e in log(base.folder)[1]], key
    assert log(folder)[0]["resumed_at"] == 25 and log(folder)[2] == log(base.folder)[2][1:]
    for name in ("last.npz", "best.npz"):
        (got_meta, got), (want_meta, want) = raw(folder / name), raw(base.folder / name)
        assert got.keys() == want.keys() and all(got[k].tobytes() == want[k].tobytes() for k in want)
        assert all(got_meta["run"][key] == want_meta["run"][key] for key in ("step", "cursor", "best"))


def test_resume_auto_starts_in_an_empty_folder_or_one_without_a_checkpoint_and_then_goes_on(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text('{"versions": {}}\n')  # of a run that was killed before it saved
    for flags in (dict(out=tmp_path / "run"), dict(resume=tmp_path / "run")):
        refused(call(train.main, data=text, **flags), "checkpoint", f"--resume auto --out {tmp_path / 'run'}")
    for folder, steps, first, last in (("run", 2, 1, 2), ("run", 1, 3, 3), ("empty", 1, 1, 1)):
        outcome = stopped(steps, resume="auto", data=text, out=tmp_path / folder, **BASE)
        assert outcome.code == 130 and saved_run(tmp_path / folder)["step"] == last
        assert log(tmp_path / folder)[1][0]["step"] == first


def test_a_run_goes_on_in_bfloat16_from_its_masters_with_other_lengths_and_batch_and_an_empty_memory(base, tmp_path):
    for name in ("last.npz", "log.jsonl"):
        (tmp_path / name).write_bytes((base.folder / name).read_bytes())
    sizes = dict(batch=6, mem_len=5, tgt_len=7, dtype="bfloat16", dropout=0, dropatt=0)
    outcome = stopped(25, resume=tmp_path, devices=1, steps=STEPS + 30, json=True, **sizes)
    assert outcome.code == 130 and "memory starts empty" in outcome.err
    found = losses(tmp_path)
    assert len(found) == 25 and all(map(math.isfinite, found)) and found[0] < losses(base.folder)[0] - 1  # as trained
    meta, arrays = raw(tmp_path / "last.npz")
    assert arrays["mems/h"].shape == (2, 6, 5, 16) and meta["run"]["cursor"] == STEPS * 8 + 25 * 7
    assert meta["dtypes"] == {"mems/h": "bfloat16"} and arrays["params/u"].dtype == np.float32
    again = stopped(1, resume=tmp_path, devices=1, json=True)
    assert again.code == 130 and "memory starts empty" not in again.err and abs(losses(tmp_path)[0] - found[-1]) < 0.5


def test_what_a_checkpoint_cannot_go_on_with_is_refused_in_one_line(base, tmp_path):
    (tmp_path / "other.txt").write_bytes(TEXT[::-1])
    for flags, *words in (
        (dict(n_layer=3), "n_layer: checkpoint 2, asked 3"),
        (dict(dtype="float64"), "dtype=float64", "JAX_ENABLE_X64=1", "float32"),
        (dict(tokenizer="char"), "tokenizer: checkpoint byte, asked char"),
        (dict(data=tmp_path / "other.txt"), "other data", f"--init {base.folder}"),
        (dict(), f"at step {STEPS} of {STEPS}", "--steps"),
        (dict(steps=STEPS + 1, optimizer="muon"), "optimizer: checkpoint adamw, asked muon"),
    ):
        refused(call(train.main, resume=base.folder, **flags), *words)


@pytest.mark.parametrize("flag", ["resume", "init", "run"])
def test_a_path_without_a_checkpoint_is_an_error_and_never_a_fresh_start(flag, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    only = ["--eval_only"] if flag == "run" else []
    for path in (tmp_path / "nowhere", tmp_path):
        refused(call(train.main, *only, data=text, **{flag: path}), path, "no checkpoint")
    assert not list(tmp_path.iterdir())


def test_data_that_cannot_be_used_is_refused_in_one_line_before_anything_compiles(tmp_path):
    compiled = len(COMPILED)
    for data, *words in (
        ("nowhere", "no such file"),
        (folder_of(tmp_path / "s", train=TEXT[:32]), "32 tokens", "at least 33", "batch=4 x tgt_len=8"),
        (folder_of(tmp_path / "v", valid=b"a"), "valid split has 1 tokens", "at least 2"),
    ):
        refused(call(train.main, data=tmp_path / data, out=tmp_path / "run", **BASE), *words)
    assert len(COMPILED) == compiled and not (tmp_path / "run").exists()


def test_ids_without_text_are_trained_evaluated_and_sampled_in_nats_per_token(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, 2000) // 2 * 2 + 1
    np.save(tmp_path / "ids.npy", ids)
    run = tmp_path / "run"
    outcome = stopped(3, data=tmp_path / "ids.npy", out=run, **BASE | dict(eval_every=2, json=False))
    assert outcome.code == 130, outcome
    assert "bpb" not in outcome.out and " nats  ppl " in outcome.out
    assert all(e["bpb"] is None for e in [*log(run)[1], *log(run)[2]])
    judged = call(train.main, "--eval_only", run=run, devices=1, json=True).entries()[0]
    assert judged["bpb"] is None and judged["ppl"] == pytest.approx(math.exp(judged["loss_nats"]))

    draw = lambda **more: call(sample.main, run=run, n_tokens=3, **more)
    entry = draw(prompt_ids="7,8", json=True).entries()[0]
    assert entry["text"] is entry["prompt"] is None and len(entry["ids"]) == 3
    assert draw(prompt_ids="7,8").out == f"7 8 {' '.join(map(str, entry['ids']))}\n" and len(draw().out.split()) == 3
    refused(draw(prompt="a"), "ids", "--prompt_ids 1,2,3")
    refused(draw(prompt_ids="256"), "prompt_ids", "0 to 255")


SENTENCE = b"the cat sat\n" * 30


def test_with_a_checkpoint_data_is_encoded_by_its_vocabulary_and_must_be_the_run_s_own_to_go_on(tmp_path):
    """One text, and prepared in bytes and in the words of its training part, of which the test part has another."""
    run = tmp_path / "run"
    text = folder_of(tmp_path / "text", train=SENTENCE, valid=SENTENCE[:48], test=b"the dog sat\n")
    for name in ("byte", "word"):
        prepare.prepare([text], tmp_path / name, tokenizer=name)
    vocab = tokenizer.build("char", SENTENCE + b"the dog sat\n")
    cfg = txl.Config(tokenizer.size(vocab), 1, 2, 16, 6, 20, mem_len=9)

    def resume(data, trained_on):
        save_model(run, cfg, make_params(cfg), vocab, trained_on)
        return call(train.main, resume=run, data=tmp_path / data, steps=1, batch=4)

    own = prepare.load(text, vocab=vocab)
    refused(resume("text", prepare.load(tmp_path / "word").tokens_sha256), f"{run} was trained on other data")
    refused(resume("word", own.tokens_sha256), "cannot be told from its tokens")
    refused(resume("byte", own.tokens_sha256), f"{run} is at step 5 of 1")  # the last check
    for way in ({"eval_only": True, "run": str(run)}, {"init": str(run)}, {"resume": str(run)}):
        for data, asked in (("text", {}), ("byte", {"tokenizer": "char"})):
            corpus = train.resolve_config(way | asked | {"data": str(tmp_path / data)})[2]
            assert corpus.vocab == vocab and tokenizer.decode(vocab, corpus.test) == b"the dog sat\n"
        refused(call(train.main, data=text, tokenizer="word", **way), "tokenizer: checkpoint char, asked word")
