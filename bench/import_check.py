"""Imported models against Hugging Face's Transformer-XL: the largest difference of log-probabilities over 8 segments.

    python -m bench.import_check --torch_python ENV/bin/python    # ENV as for bench.peers
    python -m bench.import_check --torch_python ENV/bin/python --file pytorch_model.bin    # needs torch here, too

For each setting the port makes a model of random weights, saves it by save_pretrained and scores random ids from the
first token on, its memories of length 0 at first: given none, it would start from zeros that it attends to. The folder
is imported by the command and read again as sample.py reads a run. JSON lines on standard output; ends with an error
where a difference is larger than 1e-4.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench.peers import INSTALL, ROOT, import_torch, machine

TOLERANCE = 1e-4  # float32 against float32
ROWS, SEGMENT, SEGMENTS = 3, 7, 8
SIZES = dict(vocab_size=43, n_layer=3, n_head=2, d_head=5, d_model=14, d_embed=14, d_inner=22, mem_len=11, div_val=1)
SIZES |= dict(cutoffs=[], clamp_len=-1, same_length=False, untie_r=False, dropout=0.0, dropatt=0.0)
ADAPTIVE = dict(cutoffs=[9, 20, 33], div_val=2, d_embed=16)
WT103 = ADAPTIVE | dict(untie_r=True, same_length=True, clamp_len=8)  # the kinds of options of the published weights
SETTINGS = {
    "one softmax": {},
    "same_length": dict(same_length=True),
    "untie_r": dict(untie_r=True),
    "pre_lnorm": dict(pre_lnorm=True),
    "output table of its own": dict(tie_word_embeddings=False),
    "adaptive": ADAPTIVE,
    "adaptive, div_val 1": dict(cutoffs=[9, 20], d_embed=10),
    "adaptive, div_val 1, no projection shared": dict(cutoffs=[9, 20], d_embed=10, proj_share_all_but_first=False),
    "adaptive, output tables of its own": ADAPTIVE | dict(tie_word_embeddings=False),
    "adaptive, same_length": ADAPTIVE | dict(same_length=True),
    "adaptive, same_length, untie_r, clamp_len": WT103,
    "short memory": WT103 | dict(mem_len=4),
    "long memory": WT103 | dict(mem_len=100),
}


def score_port(setting, folder, file):
    """In the port's Python: saves a model of random weights into `folder`, and the ids and scores beside its files."""
    torch = import_torch()
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel, __version__

    config = TransfoXLConfig(**SIZES | SETTINGS[setting])
    model = TransfoXLLMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "layer_norm.weight" in name else 0.0, 0.3)
        model.save_pretrained(folder, safe_serialization=file.endswith("safetensors"))
        ids = np.random.default_rng(0).integers(config.vocab_size, size=(ROWS, SEGMENT * SEGMENTS))
        mems, scores = [torch.zeros(0, ROWS, config.d_model) for _ in range(config.n_layer)], []
        for part in np.split(ids, SEGMENTS, 1):
            out = model(torch.from_numpy(part), mems=mems)
            mems = out.mems
            scores.append(out.prediction_scores.numpy())
    np.savez(Path(folder) / "scores.npz", ids=ids, scores=np.concatenate(scores, 1))
    print(f"torch {torch.__version__} transformers {__version__}")


def score_ours(run, ids):
    """Log-probabilities [rows, tokens, V] of an imported run, segment by segment from empty memory."""
    import jax

    import train
    import txl

    cfg, params, _, _ = train.load(run)

    @jax.jit
    def step(params, ids, mems):
        hidden, mems = txl.forward(params, ids, mems, cfg)
        return jax.nn.log_softmax(txl.logits(params, hidden, cfg)), mems

    mems, scores = txl.init_mems(cfg, len(ids)), []
    for part in np.split(ids.astype(np.int32), SEGMENTS, 1):
        found, mems = step(params, part, mems)
        scores.append(np.asarray(found))
    return np.concatenate(scores, 1), cfg


def compare(setting, file, torch_python, folder):
    """The result line of one setting."""
    import jax

    from data import import_checkpoint

    source, run, vocab = folder / "source", folder / "run", folder / "vocab.txt"
    command = [torch_python, "-m", "bench.import_check", "--worker", setting, "--file", file, "--folder", str(source)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"bench.import_check: {torch_python} ended with {done.returncode}, its error stands above; {INSTALL}")
    vocab.write_text("\n".join(["<eos>", "<unk>", *map(str, range(2, SIZES["vocab_size"]))]))
    with contextlib.redirect_stdout(sys.stderr):
        import_checkpoint.main([str(source), "--vocab", str(vocab), "--out", str(run)])
    with np.load(source / "scores.npz", allow_pickle=False) as z:
        ids, want = z["ids"], z["scores"]
    got, cfg = score_ours(run, ids)
    sizes = {"rows": ROWS, "tokens": ids.shape[1], "segments": SEGMENTS, "mem_len": cfg.mem_len}
    found = {"largest_difference_nats": float(np.abs(got - want).max()), "least_log_probability": float(want.min())}
    versions = f"{done.stdout.splitlines()[-1]} jax {jax.__version__}"
    return {"setting": setting, "file": file} | sizes | found | {"versions": versions}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch_python", default=sys.executable, help=INSTALL.replace("%", "%%"))
    parser.add_argument("--file", choices=("model.safetensors", "pytorch_model.bin"), default="model.safetensors")
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return score_port(args.worker, args.folder, args.file)
    worst = 0
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            line = compare(setting, args.file, args.torch_python, Path(folder))
        print(json.dumps(line | machine()), flush=True)
        worst = max(worst, line["largest_difference_nats"])
    if not worst <= TOLERANCE:
        sys.exit(f"bench.import_check: differs by {worst:.2g} nats, want at most {TOLERANCE}")


if __name__ == "__main__":
    main()
