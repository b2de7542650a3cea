#!/usr/bin/env bash
# vLLM on a GPU machine without a package index: make the packages here, put them together there, and prove that they work.
# Usage: bench/gpu_vllm.sh pack [--python 3.12] [--without-vllm]   parts of at most 45 MiB, in .vllm
#        bench/gpu_vllm.sh unpack                                  after each transfer of parts; tells what is missing
#        bench/gpu_vllm.sh prove [--dry-run] [--limit-s SECONDS]   step by step, a line of JSON for each
#   PYTHON   the interpreter (.venv/bin/python, else python3)
#   SITE     the folder for PYTHONPATH, outside the tree (streamrl-site in the folder of temporary files)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || command -v "$python" >/dev/null || python=python3
case "${1:-}" in
pack | unpack) exec "$python" -m bench.gpu_site "$@" ;;
prove) ;;
*)
    sed -n '2,5p' "$0" >&2
    exit 2
    ;;
esac
. bench/gpu_env.sh
shift
exec "$python" -m bench.gpu_prove "$@"
