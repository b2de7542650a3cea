#!/usr/bin/env bash
# Everything that one GPU can show, each section in a process of its own; device settings are left alone.
# Usage: bench/gpu.sh [--quick] [--check] [--dry-run]
#   PYTHON      the interpreter (.venv/bin/python, else python3)
#   SECTIONS    only these, e.g. "ceilings fsdp2"
#   LIMIT_S     begin no section that could end later than this
#   SITE        packages that the image lacks, by bench/gpu_vllm.sh unpack; taken where they are
#   MODEL       folder of the model of one_gpu, on sums (needs reasoning_gym); random weights of 0.6B without it
#   OUT         results and logs are copied here
#   STREAMRL_BENCH_COMMIT   the commit, where .git is not at hand
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || command -v "$python" >/dev/null || python=python3
. bench/gpu_env.sh
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0
export CUDA_MODULE_LOADING=EAGER  # two ranks in one process: a kernel's first use would wait for the one that spins
case " $* " in *" --dry-run "*) dry=1 ;; *) dry=0 ;; esac
if [ $dry = 0 ] && ! "$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)'; then
    echo "bench/gpu.sh needs a CUDA device that torch can see, and there is none here: nothing was measured" >&2
    exit 3
fi
declare -A limit=([vllm]=400 [one_gpu]=165 [install]=200 [fsdp2]=200 [quickstart]=300 [realsize]=250 [groups]=450 [shared]=180 [shapes]=60 [nccl]=90)
failed=0
# In the order of worth, so that a limit leaves out what says the least.
sections=${SECTIONS:-vllm one_gpu quickstart realsize groups fsdp2 attention shared head lagzero install ceilings fold ipc shapes nccl ranks}
sum=0 late=
for section in $sections; do
    most=${limit[$section]:-120}
    if [ $((sum + most)) -gt "${LIMIT_S:-$((sum + most))}" ]; then late="$late $section"; else sum=$((sum + most)); fi
done
[ -z "$late" ] || echo "== if all take their whole time, these are left out:$late" >&2
for section in $sections; do
    most=${limit[$section]:-120}
    if [ -n "${LIMIT_S:-}" ] && [ $((SECONDS + most)) -gt "$LIMIT_S" ]; then
        echo "== $section is left out: $SECONDS s are gone, and it may take $most of $LIMIT_S" >&2
        continue
    fi
    echo "== $section" >&2
    timeout "$most" "$python" -m bench.gpu --only "$section" "$@" || { echo "section $section failed" >&2; failed=1; }
    if [ $dry = 0 ] && [ -n "${OUT:-}" ]; then
        cat bench/results/gpu/*.jsonl >"$OUT/gpu.jsonl" 2>/dev/null  # after each: a section that hangs loses no other
    fi
done
exit $failed
