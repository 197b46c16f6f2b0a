"""The scripts of tools/bench at sizes of seconds: they work with this tree, and what they prove holds."""

import numpy as np
import pytest
from runs import call

from tools.bench import generation, gpu, memory, quality


def test_the_script_for_an_accelerator_runs_small_on_a_cpu_and_finds_all_attentions_alike():
    verdict, *checks, step, _ = call(gpu.main, "check", "step", "decode", tiny=True, peak_tflops=2).entries()
    assert verdict["verdict"] == "pass" and not verdict["failed"]
    assert [line["attention"] for line in checks] == ["dense", "chunked", "pallas"]
    for line in checks:
        assert line["repeats_identical"] and gpu.passed(line) and not gpu.passed(line | {"k_error": float("nan")})
        assert all(line[f"{of}_error"] < 1e-2 for of in ("out", "q_u", "q_v", "k", "r"))  # bfloat16
    assert 0 < step["of_peak"] <= step["model_tflops"] and step["plan_mib"] > 0


def test_live_bytes_do_not_grow_with_the_tokens_generated():
    lines = call(generation.main, "flat", tiny=True, blocks=1).entries()
    kept = {line["tokens"]: line["live_bytes"] for line in lines if line["what"] == "kept"}
    assert list(kept) == [20, 52, 308] and len(set(kept.values())) == 1
    # a ring of 16 + 1 keys and one of values in each of 2 layers, 2 heads of 6 channels, and the rest
    assert kept[308] >= 4 * 2 * 2 * 17 * 2 * 6


@pytest.mark.parametrize(
    "main, part", [(memory.main, "plan"), (generation.main, "evaluation"), (quality.main, "yardsticks")]
)
def test_a_script_prints_results_as_json_lines_with_the_machine(main, part):
    lines = call(main, part, tiny=True).entries()
    assert lines and all(line["jax"] and line["cpu"] for line in lines)


def test_n_gram_probabilities_of_all_bytes_sum_to_one_after_any_context():
    text = np.random.default_rng(0).integers(97, 104, 500).astype(np.uint8)
    tables = quality.ngram_tables(text, 4)
    for context in (text[50:53], text[-3:], [1, 98, 99], [1, 2, 3]):
        texts = [np.array([*context, byte], np.uint8) for byte in range(256)]
        probs = [quality.ngram_probs(tables, text)[0] for text in texts]
        assert min(probs) > 0 and sum(probs) == pytest.approx(1)


@pytest.mark.parametrize("stride", [32, 64])
@pytest.mark.parametrize("n", [1, 40, 64, 65, 1000, 64 * 130])
def test_each_target_counts_once_in_windows_and_late_in_those_that_overlap(n, stride):
    times, late = np.zeros(n, int), True
    for index, counted in quality.windows(n, stride):
        np.add.at(times, index[counted], 1)
        late &= (index[:, : 64 - stride] < 64)[counted[:, : 64 - stride]].all()
    assert (times == 1).all() and late
