"""The README's tables and figures are those of the committed result files."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = " ".join(README.split())


def results(name, **want):
    """The lines of a result file that have these values."""
    lines = (ROOT / "bench" / "results" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if all(entry.get(key) == value for key, value in want.items())]


def row(*cells):
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def plan_rows():
    for entry in results("plan_enwik8_base"):
        s = entry["setting"]
        cells = s["remat"], s["attention"], s["layer_rows"] or "auto", s["loss_chunk"] or "all", s["batch_chunk"]
        mib = f"{entry['total_mib']:,.0f}", f"{entry['evaluation_mib']:,.0f}"
        yield row(*cells, s["dtype"], *mib, f"x {entry['recompute']:.2f}")


def length_rows():
    for name, what in (("thrifty", "remat full, chunked, MiB"), ("dense", "dense, nothing rebuilt, MiB")):
        entries = results("memory", what=name)
        assert [entry["tgt_len"] for entry in entries] == [256, 512, 1024, 2048]
        yield row(what, *(f"{entry['total_mib']:,.0f}" for entry in entries))


def device_rows():
    mib = lambda x: f"{x:,.0f}"
    for kind in ("none", "opt", "params"):
        adam, muon = (results("devices", what="memory", optimizer=name, shard=kind)[0] for name in ("adam", "muon"))
        held = f"{adam['optimizer_mib']:.0f} ({muon['optimizer_mib']:.0f})"
        yield row(
            f"`--shard {kind}`", mib(adam["parameters_mib"]), held, mib(adam["total_mib"]), mib(muon["total_mib"])
        )
    for entry in results("devices", shard_group=2):
        cells = (mib(entry[f"{name}_mib"]) for name in ("parameters", "optimizer", "total"))
        yield row(f"{entry['shard']}, groups of 2", *cells, "")


def peer_rows():
    for entry in results("peers_small") + results("peers_long"):
        options = "".join(f"`--{name} {value}`" for name, value in entry["ours"].items()) or "defaults"
        speeds = f"{entry['ours_tok_per_s']:,.0f}", f"{entry['hf_tok_per_s']:,.0f}"
        yield row(entry["setting"], options, *speeds, f"{entry['ratio']:.2f}", f"{entry['growth_ratio']:.2f}")


def reading_rows():
    runs = [*results("reading", part="decode", what="reuse"), *results("reading", part="decode", what="many")]
    assert [(run["rows"], run["mem_len"]) for run in runs] == [(1, 512), (1, 2048), (16, 512)]
    yield row("tokens per second", *(f"{run['tok_per_s']:,.0f}" for run in runs))
    ratios = [
        f"{run['ratio']:.1f} x" for what in ("reuse", "many") for run in results("reading", what=f"{what} / port")
    ]
    yield row("against Hugging Face's port with its memory full, one row", *ratios)
    times = (f"{run['times_reading']:.2f}" for run in runs)
    yield row("time, in times of reading parameters, cache and positions once", *times)


FUZZED = dict(prompt="random prompts", data="random bytes as data", vocabulary="random vocabularies", log="random logs")
FUZZED["checkpoint"] = "random checkpoints: bytes, meta, headers that claim a terabyte, bombs"


def fault_rows():
    one = lambda what: results("faults", what=what)[0]
    killed, cut, flipped = one("kill -9 while saving"), one("cut at every 1/50"), one("a byte flipped")
    assert killed["loaded"] == killed["trials"] and cut["refused_by_name"] == cut["trials"]
    half = f"`kill -9` while saving ({killed['half_written']} times with a half-written file)"
    yield row(half, killed["trials"], "the newest whole checkpoint loads", killed["wrong"] + killed["lost"])
    refused = "refused by name, the older one used and said"
    yield row("a checkpoint cut at every 1/50 of its length", cut["trials"], refused, cut["wrong"])
    flips = f"{flipped['refused_by_name']} refused by name, {flipped['harmless']} in bytes that hold nothing"
    yield row("a single byte of a checkpoint flipped", flipped["trials"], flips, flipped["wrong"])
    stops = [one(what) for what in ("SIGINT", "SIGTERM", "two SIGINT")]
    n, told, none, good = (sum(e[k] for e in stops) for k in ("trials", "newest_loads", "before_any_step", "exit_code"))
    ended = f"exit 130 or 143; {told} told how to go on and load, {none} had done no step"
    yield row("Ctrl-C, SIGTERM, two Ctrl-C", n, ended, n - good)


def fuzz_rows():
    """Those of random input: 500 cases or more of each kind, each case counted once."""
    for kind, name in FUZZED.items():
        runs = results("faults", what=f"fuzz {kind}")
        parts = sorted((run["first"], run["first"] + run["trials"]) for run in runs)
        assert parts[0][0] == 0 and all(a[1] == b[0] for a, b in zip(parts, parts[1:])) and parts[-1][1] >= 500
        total = {key: sum(run[key] for run in runs) for key in ("trials", "worked", "refused", "wrong", "outside")}
        assert total["worked"] + total["refused"] + total["wrong"] == total["trials"]
        taken = f"{total['worked']} taken, {total['refused']} refused in one line"
        yield row(name, total["trials"], taken, total["wrong"] + total["outside"])


ROWS = [plan_rows, length_rows, device_rows, peer_rows, reading_rows, fault_rows, fuzz_rows]


@pytest.mark.parametrize("rows", ROWS)
def test_a_table_has_the_rows_that_were_measured(rows):
    rows = list(rows())
    assert len(rows) > 1
    for line in rows:
        assert f"\n{line}\n" in README


def test_figures_in_the_text_are_those_that_were_measured():
    (time,), (resident,) = results("memory", what="time"), results("memory", what="resident")
    said = [f"takes {time['ratio']:.2f} times as long as the fastest options"]
    said += [f"a run of {resident['plan_mib']} MiB by the plan grew this process's resident memory"]
    said += [f"by {resident['grown_mib']} MiB"]
    thrifty = results("memory", what="plan", jax="0.12.0.1")[0]
    said += [f"In bfloat16 the thriftiest step needs {thrifty['total_mib']:,.0f} MiB with jax 0.12"]
    said += [f"One device with all 24 rows needs {results('devices', devices=1)[0]['total_mib']:,.0f}"]
    ratio = {(e["optimizer"], e["shard"]): f"{e['ratio']:.2f}" for e in results("devices", what="time")}
    said += [f"takes {ratio['muon', 'opt']} (opt) and {ratio['muon', 'params']} (params) of its time; with Adam"]
    said += [f"with Adam {ratio['adam', 'opt']} and {ratio['adam', 'params']}."]
    share = results("peers_small", ours={})[0]["share_of_matmul_rate"]
    said += [f"The small setting's step runs at {share:.0%} of the rate of a"]
    seeds = [f"{entry['bpb']:.2f}" for entry in results("seeds", split="valid")]
    said += [f"Three seeds end at {seeds[0]}, {seeds[1]} and {seeds[2]} valid bits per byte"]
    (clock,), trained = results("peers_clock"), results("peers_quality")
    said += [f"our copy of it in PyTorch at {trained[-1]['valid_nats']:.3f}, in {clock['clock_full_s']:.0f} s here"]
    for steps in (290, 960):
        found = results(f"quality{'_290' * (steps == 290)}", step=steps, split="valid")[-1]["loss_nats"]
        share = steps / clock["ours_steps_in_clock_full"]
        said += [f"at {found:.3f} after {steps} steps, {share * 100:.0f}% of "]
    (last,) = results("reading", part="flat", what="kept", tokens=99_892)
    said += [f"A token after 99,892 others takes {last['ratio']:.2f} of the time of one after 100"]
    training, generating = (entry for entry in results("faults") if "resident_growth" in entry)
    said += [f"grow resident memory by {training['resident_growth']:.1%} after step 200"]
    said += [f"200,000 generated tokens by {generating['resident_growth']:.1%}"]
    largest = max(entry["largest_difference_nats"] for entry in results("import_check"))
    said += [f"ours repeats within {largest:.1e}".replace("e-0", "e-")]
    for words in said:
        assert words in PROSE
