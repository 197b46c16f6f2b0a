"""Imported models beside Hugging Face's Transformer-XL: the largest difference of log-probabilities over 8 segments.

    python -m tools.bench.import_check --torch_python ENV/bin/python    # ENV as for peers.py; 3 minutes
    python -m tools.bench.import_check --torch_python ENV/bin/python --file pytorch_model.bin    # needs torch here, too

For each setting the port saves a model of random weights and scores random ids from the first token on, its memories of
length 0 at first: given none, it would start from zeros that it attends to. The folder is imported by the command and
read again as sample.py reads a run. Ends with an error where a difference is larger than 1e-4 nats.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tools.bench import harness
from tools.bench.peers import INSTALL, import_torch

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
    torch, hf = import_torch()
    config = hf.TransfoXLConfig(**SIZES | SETTINGS[setting])
    model = hf.TransfoXLLMHeadModel(config).eval()
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
    print(harness.package_versions("torch", "transformers"))


def score_ours(run, ids):
    """Log-probabilities [rows, tokens, V] of an imported run, segment by segment from empty memory."""
    import jax

    import txl
    from data import checkpoint

    cfg, params, _, _ = checkpoint.load(run)

    @jax.jit
    def step(params, ids, mems):
        hidden, mems = txl.forward(params, ids, mems, cfg)
        return jax.nn.log_softmax(txl.logits(params, hidden, cfg)), mems

    mems = txl.init_mems(cfg, len(ids))
    scores = []
    for part in np.split(ids.astype(np.int32), SEGMENTS, 1):
        found, mems = step(params, part, mems)
        scores.append(np.asarray(found))
    return np.concatenate(scores, 1), cfg


def compare(setting, file, torch_python, folder):
    """The result line of one setting."""
    from data import import_checkpoint

    source, run, vocab = folder / "source", folder / "run", folder / "vocab.txt"
    words = ["-m", "tools.bench.import_check", "--worker", setting, "--file", file, "--folder", str(source)]
    done = subprocess.run([torch_python, *words], cwd=harness.ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"tools.bench.import_check: {torch_python} ended with {done.returncode}, see above; {INSTALL}")
    vocab.write_text("\n".join(["<eos>", "<unk>", *map(str, range(2, SIZES["vocab_size"]))]))
    with contextlib.redirect_stdout(sys.stderr):
        import_checkpoint.main([str(source), "--vocab", str(vocab), "--out", str(run)])
    with np.load(source / "scores.npz", allow_pickle=False) as z:
        ids, want = z["ids"], z["scores"]
    got, cfg = score_ours(run, ids)
    line = {"setting": setting, "file": file, "rows": ROWS, "tokens": ids.shape[1], "segments": SEGMENTS}
    line |= {"mem_len": cfg.mem_len, "largest_difference_nats": float(np.abs(got - want).max())}
    return {**line, "least_log_probability": float(want.min()), "versions": done.stdout.splitlines()[-1]}


def main(argv=None):
    parser = argparse.ArgumentParser("python -m tools.bench.import_check", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--torch_python", default=sys.executable, help=INSTALL.replace("%", "%%"))
    parser.add_argument("--file", choices=("model.safetensors", "pytorch_model.bin"), default="model.safetensors")
    parser.add_argument("--tiny", action="store_true", help="the last setting alone")
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return score_port(args.worker, args.folder, args.file)
    worst = 0
    for setting in list(SETTINGS)[-1 if args.tiny else 0 :]:
        with tempfile.TemporaryDirectory() as folder:
            line = compare(setting, args.file, args.torch_python, Path(folder))
        harness.emit(line)
        worst = max(worst, line["largest_difference_nats"])
    if not worst <= TOLERANCE:
        sys.exit(f"tools.bench.import_check: differs by {worst:.2g} nats, want at most {TOLERANCE}")


if __name__ == "__main__":
    main()
