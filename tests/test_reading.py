"""The command that measures reading and generating, at tiny sizes: what it says, and bytes that do not grow."""

import re

import pytest
from runs import call

from bench import reading


@pytest.fixture(scope="module")
def lines():
    outcome = call(reading.main, tiny=True, blocks=1)
    assert outcome.code is None and "the port is left out: pip install" in outcome.err, outcome
    return outcome.entries()


def test_reuse_is_set_against_recomputing_and_against_a_memory_too_and_each_line_says_what_it_compares(lines):
    found = {line["what"]: line for line in lines if "/" in line["what"]}
    assert set(found) == {"reuse / hidden", "reuse / recompute", "hidden / recompute", "cache / training forward"}
    assert "reads its last 17 tokens anew" in found["reuse / recompute"]["says"]
    assert "not a speed-up over a model that keeps anything" in found["reuse / recompute"]["says"]
    assert "a baseline with memory, too" in found["reuse / hidden"]["says"]
    for line in lines:
        assert re.search("against", line["says"]) and line["versions"] and line["cpu"], line
    for line in found.values():
        low, high = line["ratio_range"]
        assert low == line["ratio"] == high > 0  # one block


def test_live_bytes_do_not_grow_with_the_tokens_generated(lines):
    kept = {line["tokens"]: line for line in lines if line["what"] == "kept"}
    assert list(kept) == [20, 52, 308]
    assert len({line["live_bytes"] for line in kept.values()}) == 1
    # a ring of 16 + 1 keys and one of values in each of 2 layers, 2 heads of 6 channels, and the rest
    assert kept[308]["live_bytes"] >= 4 * 2 * 2 * 17 * 2 * 6
    run, longer = (line for line in lines if line["what"] == "decoded")
    assert run["tokens"] == longer["tokens"][:2] + [44] == [12, 28, 44]
    assert run["says"].startswith("one text, token by token: the last 16 of 52 tokens")


def test_what_a_step_reads_is_counted_once(lines):
    read = {(line["what"], line["mem_len"]): line["read_mib"] * 2**20 for line in lines if "read_mib" in line}
    layer = 4 * 2 * 6 * (2 * 17 + 17)  # its rings and its table of positions, float32
    assert read["reuse", 32] - read["reuse", 16] == pytest.approx(2 * layer / 17 * 16, abs=8)  # four digits are printed
    assert read["hidden", 16] - read["recompute", 16] == pytest.approx(2 * 16 * 16 * 4 + 4, abs=8)


def test_a_part_that_is_none_is_refused_naming_those_there_are():
    outcome = call(reading.main, "decod", tiny=True)
    assert outcome.code == 2 and "decod is no part: give decode, flat, evaluation" in outcome.err
