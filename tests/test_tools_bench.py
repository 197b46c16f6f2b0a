"""The scripts of tools/bench at sizes of seconds: they work with this tree, and what they prove holds."""

import pytest
from runs import call

from tools.bench import generation, gpu, quality


def test_the_script_for_an_accelerator_runs_small_on_a_cpu_and_finds_all_attentions_alike():
    verdict, *checks, step = call(gpu.main, "check", "step", tiny=True, peak_tflops=2).entries()
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


@pytest.mark.parametrize("main, part", [(generation.main, "evaluation"), (quality.main, "yardsticks")])
def test_a_script_prints_results_as_json_lines_with_the_machine(main, part):
    lines = call(main, part, tiny=True).entries()
    assert lines and all(line["jax"] and line["cpu"] for line in lines)
