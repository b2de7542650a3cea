#!/usr/bin/env bash
# The packages of a launched run that a bare GPU image (Python 3.12, torch, transformers) lacks, as wheels to carry: about
# 7 MB. Usage: bench/gpu_wheels.sh [FOLDER]; needs pip and a package index, which the GPU's machine may lack.
set -euo pipefail
folder=${1:-.whl}
mkdir -p "$folder"
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux2010 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    -d "$folder" msgspec==0.22.0 pyzmq==27.3.0 zstandard==0.25.0 hydra-core==1.3.8 omegaconf==2.3.1
python3 -m pip wheel -q --no-deps -w "$folder" antlr4-python3-runtime==4.9.3  # has no wheel; pure Python
du -sh "$folder"
