#!/usr/bin/env bash
# All of tools/bench/gpu.py on one accelerator in under 8 minutes; JSON lines to standard output and to $OUT/gpu.jsonl:
#     tools/bench/gpu.sh --peak_tflops 989        989: the peak of an H100 or H200; --tiny: on a CPU, to see that it works
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
"$python" -c 'import optax' 2>/dev/null || "$python" -m pip install -q 'optax>=0.2.5' 1>&2
failed=0
for part in check:90 times:180 step:150 decode:60; do # seconds that each may take
  timeout "${part#*:}" "$python" -m tools.bench.gpu "${part%:*}" "$@" | tee -a ${OUT:+"$OUT/gpu.jsonl"} || failed=1
done
exit $failed
