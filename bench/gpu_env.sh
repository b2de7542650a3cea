# Sourced by the GPU scripts, in the root of the tree: packages that were carried here, and no network.
site=${SITE:-${TMPDIR:-/tmp}/streamrl-site}
[ ! -e "$site/.done" ] || export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0  # its kernels are not carried
