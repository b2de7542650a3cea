#!/usr/bin/env bash
# Everything that one GPU can show, each section in a process of its own; device settings are left alone.
# Usage: bench/gpu.sh [--quick] [--check]     PYTHON chooses the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || command -v "$python" >/dev/null || python=python3
export HF_HUB_OFFLINE=1 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0
if ! "$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)'; then
    echo "bench/gpu.sh needs a CUDA device that torch can see, and there is none here: nothing was measured" >&2
    exit 3
fi
failed=0
for section in ceilings fold ipc install nccl fsdp2; do
    echo "== $section" >&2
    timeout 600 "$python" -m bench.gpu --only "$section" "$@" || { echo "section $section failed" >&2; failed=1; }
done
exit $failed
