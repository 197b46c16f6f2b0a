"""Train a Transformer-XL: one run from the command line to its checkpoints.

Top to bottom: flags, checkpoints, the stream of batches, the log, the run. The optimizer, the step and the state on the
devices are in step.py, evaluation in evaluation.py, texts and files in data/.
"""

import contextlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import figures
import plan
import profiling
import shard
import txl
from data import checkpoint, flags, prepare, tokenizer
from data.folder import locked, open_log
from evaluation import bits_per_byte, eval_only, evaluate, judged, make_eval
from step import compile_step, fresh_state, init_state, make_whole, pieces, to_devices, to_host
from stop import signals, start

# what a resumed run may change: all else decides shapes or meaning
FREE = ("mem_len", "dropout", "dropatt", "clamp_len", "same_length", "remat", "attention", "attn_block", "loss_chunk")
FREE += ("dtype", "layer_rows", "reset_on")
# what a resumed run does not inherit
CALL = ("out", "devices", "resume", "init", "eval_only", "run", "split", "json", "plan", "memory_budget")
CALL += ("mem_fraction", "preallocate", "profile", "coordinator", "process_id", "n_processes")
# the least value of a number; of all others whole ones start at 1, and fractions are more than 0
LEAST = dict.fromkeys(("seed", "weight_decay", "warmup", "devices", "lr_min", "mem_fraction", "mem_reset"), 0)
LEAST |= dict.fromkeys(("skip_nonfinite", "shard_group", "process_id", "n_processes"), 0)

EXAMPLES = (
    "python train.py --data my.txt --steps 3000                 # train on a text of your own",
    "python train.py --plan --batch 64 --tgt_len 256            # what that needs in memory, and what would need less",
    "python train.py --eval_only --split test --eval_batch 1    # the newest run's loss on the test split",
)


@dataclass(frozen=True)
class Run:
    # data and checkpoints
    data: str = ""  # text file, folder of train.txt valid.txt test.txt, prepared folder or NAME; none: Python's source
    tokenizer: str = ""  # byte, char or word; none: byte, or what the data was prepared with
    resume: str = ""  # run folder to go on with; auto: --out if it holds a checkpoint
    init: str = ""  # run folder or checkpoint to take weights and vocabulary from
    # training
    steps: int = 1500  # optimizer steps
    batch: int = 32  # rows of the whole step, over all devices
    tgt_len: int = 64  # tokens of a row in one step
    optimizer: str = "muon"  # adam, adamw or muon (matrices by Muon, the rest by Adam)
    lr: float = 1e-2  # peak learning rate; adam and adamw want about a fifth of muon's
    lr_min: float = 0.0  # cosine: where the learning rate ends, as a share of the peak
    warmup: int = 50  # steps from 0 to the peak
    schedule: str = "cosine"  # cosine, inv_sqrt or constant
    beta2: float = 0.99  # Adam's second decay rate
    weight_decay: float = 0.01  # adamw, muon: decay of the weights, times the learning rate
    clip: float = 1.0  # largest global norm of the gradient
    mem_reset: float = 0.01  # share of rows whose memory is emptied at each step: a text begins with none
    skip_nonfinite: int = 0  # steps in a row that are skipped where the loss or gradient is NaN or infinite; 0: stop
    seed: int = 1  # of the initial weights and of dropout
    # evaluation
    eval_every: int = 250  # steps between evaluations, each followed by a checkpoint
    eval_tokens: int = 50_000  # targets of the valid split read in these
    eval_batch: int = 8  # rows that an evaluation splits its text into; 1 for published numbers
    eval_only: bool = False  # evaluate --run on --split and stop
    run: str = ""  # with --eval_only: run folder or checkpoint; none: the newest run
    split: str = "valid"  # with --eval_only: train, valid or test
    # memory: none of these changes a result beyond rounding, but dtype
    batch_chunk: int = 1  # parts that a device's rows are computed in, one after the other
    plan: bool = False  # print what this and thriftier settings need in memory, and stop
    memory_budget: str = ""  # take the first setting, from cheap to thrifty, that needs no more: 6GiB, 500MiB, 80%
    mem_fraction: float = 0.0  # share of a GPU's memory; 0: XLA_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_MEM_FRACTION
    preallocate: bool = True  # take that share at once, or as needed; neither given: XLA_PYTHON_CLIENT_PREALLOCATE says
    # devices
    devices: int = 0  # devices to use; 0: all
    shard: str = "none"  # cut into one part a device: none, opt (optimizer state) or params (parameters, too)
    shard_group: int = 0  # devices that share one set of parts; every such group has all of them. 0: all devices
    coordinator: str = ""  # several machines: HOST:PORT of process 0, or auto: what a cluster (Slurm, MPI, TPU) tells
    process_id: int = 0  # with --coordinator: number of this process
    n_processes: int = 0  # with --coordinator: processes in all
    # output
    out: str = ""  # run folder; none: the first free runs/NAME-N
    log_every: int = 50  # steps between log lines
    json: bool = False  # print the log's JSON lines instead of text
    profile: str = ""  # folder to leave a trace of a few steps and a memory profile in

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if type(f.default) is int and value >= 2**31:
                raise ValueError(f"{f.name}={value} is out of range: give less than 2**31")
            if isinstance(f.default, (int, float)) and not isinstance(f.default, bool):
                least = LEAST.get(f.name, 1 if isinstance(f.default, int) else None)
                if not math.isfinite(value) or (value < least if least is not None else value <= 0):
                    want = f"{least} or more" if least is not None else "more than 0"
                    raise ValueError(f"{f.name}={value} is out of range: give {want}")
        known = {"optimizer": ("adam", "adamw", "muon"), "schedule": ("cosine", "inv_sqrt", "constant")}
        known["shard"] = shard.SHARD
        for name, names in {**known, "split": prepare.SPLITS, "tokenizer": ("", *tokenizer.KINDS)}.items():
            if getattr(self, name) not in names:
                names = ", ".join(filter(None, names))
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: give one of {names}")
        if self.memory_budget:
            plan.budget(self.memory_budget)
        for name in ("beta2", "lr_min", "mem_fraction", "mem_reset"):
            if getattr(self, name) > 1 or (name == "beta2" and self.beta2 == 1):
                raise ValueError(f"{name}={getattr(self, name)} is out of range: give at most 1")
        if self.resume and self.init:
            raise ValueError("resume and init are both given: --resume goes on with a run, --init starts a new one")
        shard.check_machines(self)
        if self.run and not self.eval_only:
            raise ValueError(f"run={self.run} is for --eval_only: give --resume or --init to train from it")


def say(*words):
    """A line of what goes on, for people: standard error of process 0."""
    if jax.process_index():
        return
    print(*words, file=sys.stderr, flush=True)


def write(data):
    """Bytes to standard output as they are, at once, whatever the locale."""
    out = getattr(sys.stdout, "buffer", None)
    if not out:
        return print(data.decode("utf-8", "replace"), end="", flush=True)
    sys.stdout.flush()
    out.write(data)
    out.flush()


# checkpoints


class Checkpoint(NamedTuple):
    cfg: txl.Config
    params: dict  # numpy arrays
    vocab: dict
    run: dict  # what a resume needs: step, cursor, flags, corpus, best loss, versions, the path


def named(tree):
    """{key path: leaf} of a pytree, the names of a checkpoint."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def load(path):
    """The Checkpoint of a run folder (best.npz, else last.npz) or file. ValueError names what is wrong with it."""
    path = checkpoint.find(path)

    def want(meta):
        return {f"params/{name}": leaf for name, leaf in named(txl.param_shapes(txl.Config(**meta["config"]))).items()}

    try:
        meta, arrays = checkpoint.read(path, want)
        cfg, vocab = txl.Config(**meta["config"]), tokenizer.check(meta["vocab"])
        run = checkpoint.check_run(meta["run"], Run) | {"path": str(path)}
        Run(**{k: v for k, v in run["flags"].items() if k not in CALL})
        checkpoint.check_memory(cfg, path)
    except (KeyError, TypeError, ValueError) as e:
        if str(path) in str(e):
            raise
        raise ValueError(f"{path} is no checkpoint of ours ({' '.join(str(e).split())}): give another one") from None
    tree = jax.tree.structure(txl.param_shapes(cfg))
    params = jax.tree.unflatten(tree, [arrays[f"params/{name}"] for name in named(txl.param_shapes(cfg))])
    return Checkpoint(cfg, params, vocab, run)


# batches: row b reads the training text from its own start on, and goes on where row b + 1 began


def need_tokens(run, corpus):
    """ValueError where a split is too short for the run."""
    for split, least in (("train", run.batch * run.tgt_len + 1), ("valid", 2), ("test", 2)):
        found = len(getattr(corpus, split))
        if found < least:
            way = f"batch={run.batch} x tgt_len={run.tgt_len} + 1; lower them or " if split == "train" else ""
            raise ValueError(f"{split} split has {found} tokens, need at least {least}: {way}give a longer text")


def batch_at(tokens, rows, cursor, T, only=slice(None)):
    """ids and targets [B, T] int32, `cursor` tokens into each of the rows that start evenly over the text."""
    start = np.arange(rows)[only] * ((len(tokens) - 1) // rows) + cursor
    at = (start[:, None] + np.arange(T)) % (len(tokens) - 1)
    return tokens[at].astype(np.int32), tokens[at + 1].astype(np.int32)


# the log


def versions():
    """Versions of what computes."""
    return {"python": sys.version.split()[0], "jax": jax.__version__, "numpy": np.__version__}


def header(cfg, run, corpus, n_devices):
    """The log's first line: everything that decides the run."""
    device = jax.local_devices()[0]
    text = {"name": corpus.name, "source": corpus.source, "sha256": corpus.sha256, "bytes": corpus.n_bytes}
    where = {"backend": device.platform, "device": device.device_kind, "n_devices": n_devices}
    asked = {"config": asdict(cfg), "run": asdict(run), "mem_mib_is": plan.memory_mib()[1]}
    block = txl.attention_block(cfg, run.tgt_len)
    taken = f"chunked, blocks of {block}" if block else "pallas" if cfg.attention == "pallas" else "dense"
    own = {"attention": taken, "corpus": text, "n_params": txl.count_params(cfg)}
    return {"versions": versions(), **where, **asked, **own}


def line(entry, run):
    """One log entry as text for the console."""
    if "skipped" in entry:
        return f"step {entry['step']}  loss or gradient is not finite: skipped, {entry['skipped']} in a row"
    took = lambda s: f"{s // 60:.0f}m{s % 60:02.0f}s"
    loss = f"{entry['loss_nats']:.4f} nats  {entry['bpb']:.4f} bpb"
    if "split" in entry:
        what = f"{entry['split']} loss of {entry['targets']:,} targets in {entry['eval_batch']} row"
        what += "s" * (entry["eval_batch"] != 1)
        what += f", mem_len {entry['mem_len']}" if "mem_len" in entry else ""
        return f"step {entry['step']}  {what}: {loss}"
    memory = "n/a" if entry["mem_mib"] is None else f"{entry['mem_mib']:,.0f} MiB"
    speed = "compiled" if entry["tok_per_s"] is None else f"{entry['tok_per_s']:,.0f} tok/s"
    head = f"step {entry['step']}/{run.steps} {entry['step'] / run.steps:.0%}  loss {loss}"
    head += f"  grad {entry['grad_norm']:.3f}  lr {entry['lr']:.2e}"
    left = f"  left {took(entry['left_s'])}" if entry["left_s"] is not None else ""
    return f"{head}  {speed}  mem {memory}{left}"


def introduce(cfg, corpus, split, n_devices, place):
    """Says what computes, which model, from or to which place, and on which text."""
    device, size = jax.local_devices()[0], f"{txl.count_params(cfg):,} parameters"
    say(f"jax {jax.__version__}, {device.platform}, {n_devices} x {device.device_kind}; {size}; {place}")
    tokens = f"{len(getattr(corpus, split)):,} {'training' if split == 'train' else split} tokens"
    say(f"{corpus.source}; sha256 {corpus.sha256}; {tokens}, vocabulary {cfg.n_token}")


def write_log(file, entry, run):
    """Appends an entry to the log and prints it."""
    file.write(json.dumps(entry) + "\n")
    file.flush()
    print(json.dumps(entry) if run.json else line(entry, run), flush=True)


# the run


def chosen(cls, given):
    """{field of a dataclass: value} of the flags given."""
    return {f.name: given[f.name] for f in fields(cls) if f.name in given}


def check_given(given):
    """ValueError for a flag that means nothing beside the others that were given."""
    if "split" in given and not given.get("eval_only"):
        raise ValueError(f"split={given['split']} is for --eval_only: give it, or leave --split out")
    for name in ("resume", "init", "out", "plan", "profile", "memory_budget") if given.get("eval_only") else ():
        if given.get(name):
            raise ValueError(f"{name}={given[name]} is for training: --eval_only reads --run, so leave --{name} out")


def inherited(run, given, source):
    """The run with a checkpoint's flags where none were given, but for those of one call."""
    had = source.run["flags"]
    run = replace(run, **{k: v for k, v in had.items() if k not in given and k not in CALL}, out=run.resume)
    if run.resume and run.optimizer != had["optimizer"]:
        raise ValueError(f"optimizer: checkpoint {had['optimizer']}, asked {run.optimizer}: leave it out")
    return run if run.shard != "none" or "shard_group" in given else replace(run, shard_group=0)


def config_of(given, run, vocab, source):
    """The config of the flags given, the rest from a checkpoint where there is one."""
    asked = chosen(txl.Config, given)
    if isinstance(asked.get("mem_len"), tuple):
        if not run.eval_only:
            raise ValueError(f"mem_len={asked['mem_len']}: several lengths are for --eval_only, give one")
        asked["mem_len"] = max(asked["mem_len"])
    if "reset_on" in asked:
        asked["reset_on"] = tokenizer.one_id(vocab, asked["reset_on"], "reset_on")
    if source:
        for name in asked.keys() - set(FREE):
            if asked[name] != getattr(source.cfg, name):
                raise ValueError(f"{name}: checkpoint {getattr(source.cfg, name)}, asked {asked[name]}: leave it out")
        cfg = replace(source.cfg, **asked)
    else:
        cfg = txl.Config(**{"n_token": tokenizer.size(vocab), **asked})
    if cfg.n_token < tokenizer.size(vocab):
        raise ValueError(f"n_token={cfg.n_token} is less than the vocabulary's {tokenizer.size(vocab)}: leave it out")
    if cfg.mem_len + run.tgt_len >= 2**31:
        found = f"mem_len={cfg.mem_len} and tgt_len={run.tgt_len} are out of range"
        raise ValueError(f"{found}: give less than 2**31 together")
    if cfg.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError("dtype=float64 needs JAX_ENABLE_X64=1: set it, or give float32")
    txl.attention_of(cfg)  # ValueError where no device can run it
    return cfg


def settle(given):
    """Flags given -> (cfg, run, corpus, checkpoint or None): everything decided and checked before any compiling."""
    run, source = Run(**chosen(Run, given)), None
    check_given(given)
    if run.resume == "auto":
        if not run.out:
            raise ValueError("--resume auto needs --out DIR, the folder to go on with or to start in")
        run = replace(run, resume=run.out if any(Path(run.out).glob("*.npz")) else "")
    if run.eval_only:
        source = load(run.run or checkpoint.newest_run())
    elif run.resume or run.init:
        source = load(checkpoint.newest(run.resume, say) if run.resume else run.init)
    if source and (run.resume or run.eval_only):
        run = inherited(run, given, source)
    if run.shard_group and run.shard == "none":
        raise ValueError(f"shard_group={run.shard_group} is for --shard opt or params: give it, or leave it out")
    corpus = prepare.load(run.data or None, run.tokenizer or None)
    vocab = source.vocab if source else corpus.vocab
    if corpus.vocab != vocab:
        corpus = prepare.recode(corpus, vocab)
    if given.get("tokenizer", vocab["kind"]) != vocab["kind"]:
        raise ValueError(f"tokenizer: checkpoint {vocab['kind']}, asked {given['tokenizer']}: leave it out")
    cfg = config_of(given, run, vocab, source)
    if run.resume and corpus.sha256 != source.run["corpus"]:
        raise ValueError(f"{run.resume} was trained on other data: start a new run from it with --init {run.resume}")
    return cfg, run, corpus._replace(vocab=vocab), source


def restore(source, cfg, run):
    """(host state, cursor) of a checkpoint to resume; memory starts empty where its shape has changed."""
    like = jax.eval_shape(lambda: init_state(cfg, run, None, run.batch))
    wanted = named(like)
    had = [source.run["flags"].get("batch"), source.cfg.mem_len, source.cfg.dtype]
    fresh = had != [run.batch, cfg.mem_len, cfg.dtype]
    want = {k: v for k, v in wanted.items() if not (fresh and k.startswith("mems/"))}
    meta, arrays = checkpoint.read(source.run["path"], lambda meta: want)
    if meta["run"]["step"] != source.run["step"]:
        raise ValueError(f"{source.run['path']} was written to while it was read: start again")
    if "mems/h" not in arrays:
        say("memory starts empty: batch, mem_len or dtype differ from the checkpoint's")
    if meta["run"]["versions"].get("jax") != jax.__version__:
        say(f"the checkpoint was written under jax {meta['run']['versions'].get('jax')}, this is {jax.__version__}")
    empty = {f"mems/{k}": v for k, v in named(txl.init_mems(cfg, run.batch)).items()}
    leaves = [arrays[name] if name in arrays else np.asarray(empty[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), meta["run"]["cursor"]


def prepared(cfg, run, source, n_devices):
    """(devices' state, steps done, tokens read of each row, best loss) at the start of a run."""
    if not run.resume:
        return fresh_state(cfg, run, source and source.params, n_devices), 0, 0, math.inf
    try:
        host, cursor = restore(source, cfg, run)
    except ValueError as e:
        sys.exit(f"train.py: {e}")
    return to_devices(host, n_devices, run), source.run["step"], cursor, source.run["best"]


def fetch(told):
    """What a step tells, as floats: waits for the step."""
    return [float(x) for x in np.asarray(told)]


def step_entry(number, told, ms, corpus, run):
    """The log entry of a step that took `ms`, None where it was not measured."""
    loss, grad_norm, lr = told
    entry = {"step": number, "loss_nats": loss, "bpb": bits_per_byte(loss, corpus, "train"), "grad_norm": grad_norm}
    entry |= {"lr": lr, "tok_per_s": ms and run.batch * run.tgt_len / ms * 1e3, "step_ms": ms}
    return entry | {"mem_mib": plan.memory_mib()[0], "left_s": ms and (run.steps - number) * ms / 1e3}


class Job(NamedTuple):
    cfg: txl.Config
    run: Run
    corpus: prepare.Corpus
    n_devices: int
    folder: Path
    log: object  # the open log.jsonl
    whole: object  # makes whole parameters on each device of the state's


def finite(number, folder, **values):
    """Ends the run where one of the values of step `number` is not finite."""
    if not all(map(math.isfinite, values.values())):
        what = ", ".join(f"{name} {value}" for name, value in values.items())
        kept = "keeps its last good checkpoint" if any(folder.glob("*.npz")) else "has no checkpoint yet"
        found = f"train.py: {what} at step {number}: stopped; {folder} {kept}"
        sys.exit(f"{found}. Lower --lr, raise --warmup, or skip such steps: --skip_nonfinite 3")


def report(job, number, told, first, clock):
    """Checks what step `number` told, and logs it where that is due.

    clock: time and step of the last log line, steps skipped in a row until now.
    """
    told = fetch(told)
    clock[2] = 0 if all(map(math.isfinite, told[:2])) else clock[2] + 1
    if clock[2] > job.run.skip_nonfinite:
        finite(number, job.folder, loss=told[0], grad_norm=told[1])
    if clock[2]:
        write_log(job.log, {"step": number, "skipped": clock[2]}, job.run)
    elif number % job.run.log_every == 0 or number in (first + 1, job.run.steps):
        now, (then, at) = time.perf_counter(), clock[:2]
        clock[:2] = now, number
        ms = then and (now - then) * 1e3 / (number - at)
        write_log(job.log, step_entry(number, told, ms, job.corpus, job.run), job.run)


def judge(job, eval_fn, params, number, split, stop, limit=None):
    """Mean nats of a split, or of its first `limit` targets; logged. None where `stop` ends it before."""
    tokens = getattr(job.corpus, split)[: limit and limit + 1]
    found = evaluate(eval_fn, params, tokens, job.cfg, job.run, job.n_devices, stop)
    if found is None:
        return None
    entry = judged(*found, number, split, job.corpus, job.run)
    finite(number, job.folder, **{f"{split}_loss": entry["loss_nats"]})
    write_log(job.log, entry, job.run)
    return entry["loss_nats"]


def keep(job, state, names, **known):
    """Saves the devices' state under `names`; known: step, cursor and best loss."""
    about = {"flags": asdict(job.run), "corpus": job.corpus.sha256, "versions": versions()}
    meta = {"config": asdict(job.cfg), "vocab": job.corpus.vocab, "run": about | known}
    host = named(to_host(state, job.cfg, job.run))
    for name in names if jax.process_index() == 0 else ():
        checkpoint.save(job.folder / name, host, meta)


def ended(job, number, asked):
    """Ends a run that signal `asked` stopped at step `number`, all of it saved, and says how to go on."""
    way = f"--resume {job.folder}" if number < job.run.steps else f"--eval_only --run {job.folder / 'last.npz'}"
    say(f"stopped at step {number}: go on with python train.py {way}")
    sys.exit(128 + asked)


def loop(job, compiled, eval_fn, state, first, cursor, best, stop):
    """Steps, a log line now and then, evaluations, checkpoints; at the end all of valid and test -> state."""
    run, clock, waiting, flag = job.run, [None, first, 0], None, 0
    for number in range(first + 1, run.steps + 1):
        batch = batch_at(job.corpus.train, run.batch, cursor, run.tgt_len, shard.own(run.batch))
        batch = pieces(batch, job.n_devices // jax.process_count())
        state, told = compiled(state, *batch, np.int32(number - 1))
        cursor += run.tgt_len
        asked, flag = shard.agreed(stop.number, flag)
        if waiting:
            report(job, *waiting, first, clock)  # a step late, so that the device has work meanwhile
        waiting = (number, told)
        if run.profile and number == min(first + 4, run.steps):
            say(profiling.steps(compiled, state, batch, run.profile))
            clock[0] = None
        if number % run.eval_every and number != run.steps and not asked:
            continue
        report(job, number, told, first, clock)
        paused, waiting = time.perf_counter(), None
        loss = None if asked else judge(job, eval_fn, job.whole(state.params), number, "valid", stop, run.eval_tokens)
        if loss is None:
            keep(job, state, ["last.npz"], step=number, cursor=cursor, best=best)
            ended(job, number, asked or stop.number)
        names, best = ["last.npz"] + ["best.npz"] * (loss < best), min(loss, best)
        keep(job, state, names, step=number, cursor=cursor, best=best)
        if clock[0]:
            clock[0] += time.perf_counter() - paused
    for split in ("valid", "test"):
        if judge(job, eval_fn, job.whole(state.params), run.steps, split, stop) is None:
            ended(job, run.steps, stop.number)
    return state


def short_sample(params, vocab, cfg, n=200, temperature=0.8):
    """Text that the model writes from the default prompt: a look at what it has learnt."""
    first = jnp.asarray(tokenizer.encode(vocab, tokenizer.default_prompt(vocab))[:1], jnp.int32)

    @jax.jit
    def write(params, key):
        def body(carry, key):
            ids, cache = carry
            scores, cache = txl.extend(params, ids[:, None], cache, cfg)
            scores = scores[:, 0, : tokenizer.size(vocab)]
            ids = jax.random.categorical(key, scores / temperature).astype(jnp.int32)
            return (ids, cache), ids[0]

        return lax.scan(body, (first, txl.init_cache(params, cfg, 1)), jax.random.split(key, n))[1]

    return tokenizer.decode(vocab, np.asarray(write(params, jax.random.key(0)))).decode("utf-8", "replace")


def train(cfg, run, corpus, source, n_devices, folder, stop):
    """One run: the step compiled, the state made, the loop, what it has come to."""
    compiled = compile_step(cfg, run, n_devices)  # before there is any state
    state, first, cursor, best = prepared(cfg, run, source, n_devices)
    head = header(cfg, run, corpus, n_devices) | {"plan": plan.entry(cfg, run, n_devices, compiled)}
    with open_log(folder / "log.jsonl" if jax.process_index() == 0 else os.devnull) as log:
        log.write(json.dumps(head if not first else {"resumed_at": first, **head}) + "\n")
        job = Job(cfg, run, corpus, n_devices, folder, log, make_whole(cfg, run, n_devices))
        state = loop(job, compiled, make_eval(cfg), state, first, cursor, best, stop)
    params = jax.tree.map(np.asarray, job.whole(state.params))
    if jax.process_index() == 0:
        figures.runs([folder], folder / "loss.png")
    (mib, whose), planned = plan.memory_mib(), head["plan"]["total_mib"]
    show = lambda n: "unknown" if n is None else f"{n:,.0f} MiB"
    whose += ", imports and compiling included" * (whose == "process peak")
    say(f"memory: the step's plan {show(planned)} a device; reached {show(mib)} ({whose})")
    if not run.json:
        text = short_sample(params, corpus.vocab, cfg)
        write(f"sample:\n{text}\ncheckpoints and log in {folder}\n".encode("utf-8", "surrogateescape"))


def print_evaluations(cfg, run, corpus, source, lengths, n_devices):
    """Evaluates a checkpoint, with each of several memory lengths where `lengths` is a tuple; then draws them."""
    several, entries = isinstance(lengths, tuple), []
    try:
        for entry in eval_only(cfg, run, corpus, source, lengths if several else (cfg.mem_len,), n_devices):
            entries.append(entry)
            print(json.dumps(entry) if run.json else line(entry, run), flush=True)
    except jax.errors.JaxRuntimeError as e:
        if not plan.ran_out(e):
            raise
        less = "a smaller --eval_batch, --mem_len or --tgt_len, --attention chunked, --dtype bfloat16"
        sys.exit(f"train.py: out of memory: give {less}, or more --devices")
    if several and jax.process_index() == 0:
        say(figures.lengths(entries, Path(source.run["path"]).parent / f"mem_len_{run.split}.png"))


def allocator(given):
    """Sets what jax reads when it first touches a device: before that, or it changes nothing."""
    if given.get("mem_fraction"):
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # jaxlib refuses both names at once
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(given["mem_fraction"])
    if "preallocate" in given:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(given["preallocate"]).lower()


def out_of_memory(cfg, run, n_devices, error):
    """What to say when memory ran out: what was asked for, the largest arrays, what would need less."""
    say(f"{str(error).splitlines()[0]}\nlargest arrays: {plan.largest_arrays()}")
    plan.show(cfg, replace(run, json=False), n_devices)
    less = "--remat full, --attention chunked, --loss_chunk 1024, --layer_rows 1, --dtype bfloat16"
    less += ", then a smaller --batch, or --eval_batch in an evaluation"
    return f"out of memory: see the plan above, and try in this order {less}"


def main(argv=None):
    given = flags.parse(argv, "train.py", __doc__.splitlines()[0], (txl.Config, Run), EXAMPLES)
    allocator(given)
    try:
        cfg, run, corpus, source = settle(given)
        shard.connect(run)
        n_devices = shard.count_devices(run)
        if run.eval_only:
            introduce(cfg, corpus, run.split, n_devices, f"{source.run['path']}, step {source.run['step']}")
            return print_evaluations(cfg, run, corpus, source, given.get("mem_len"), n_devices)
        if run.plan:
            return plan.show(cfg, run, n_devices)
        need_tokens(run, corpus)
        if run.resume and source.run["step"] >= run.steps:
            raise ValueError(f"{run.resume} is at step {source.run['step']} of {run.steps}: give more --steps")
        if run.profile:
            profiling.prepare(run.profile)
        if run.memory_budget:
            cfg, run, taken = plan.choose(cfg, run, n_devices, plan.budget_bytes(run.memory_budget))
            say(f"memory_budget {run.memory_budget}:\n{plan.table([taken], 'what is taken')}")
        folder = run.resume or (jax.process_index() and run.out)  # process 0 makes it
        folder = Path(folder or checkpoint.new_folder(run.out, corpus.name, given.get("resume") == "auto"))
    except (ValueError, OSError) as e:
        sys.exit(f"train.py: {e}")
    introduce(cfg, corpus, "train", n_devices, folder)
    shard.announce(folder)
    try:
        with locked(folder, say) if jax.process_index() == 0 else contextlib.nullcontext(), signals() as stop:
            train(cfg, run, corpus, source, n_devices, folder, stop)
    except OSError as e:  # a full disk, or another run in the folder
        sys.exit(f"train.py: {e}")
    except jax.errors.JaxRuntimeError as e:
        if not plan.ran_out(e):
            raise
        sys.exit(f"train.py: {out_of_memory(cfg, run, n_devices, e)}")


if __name__ == "__main__":
    start(main)
