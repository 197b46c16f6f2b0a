#!/usr/bin/env bash
# All of tools/bench/gpu.py on one accelerator in under 8 minutes; JSON lines to standard output and to $OUT/gpu.jsonl,
# the first of them with "verdict": "pass" or "fail". Correctness, then memory, then speed:
#     tools/bench/gpu.sh --peak_tflops 989        989: the peak of an H100 or H200; --tiny: on a CPU, to see that it works
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
"$python" -c 'import optax' 2>/dev/null || "$python" -m pip install -q 'optax>=0.2.5' 1>&2
failed=0
for part in check:90 memory:60 times:150 step:120 decode:50; do # seconds that each may take
  timeout "${part#*:}" "$python" -m tools.bench.gpu "${part%:*}" "$@" | tee -a ${OUT:+"$OUT/gpu.jsonl"} || {
    failed=1
    echo "{\"what\": \"${part%:*}\", \"verdict\": \"fail\", \"reason\": \"an error, or over its time\"}" | tee -a ${OUT:+"$OUT/gpu.jsonl"}
  }
done
exit $failed
