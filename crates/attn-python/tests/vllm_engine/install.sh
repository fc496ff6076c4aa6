#!/usr/bin/env bash
# Puts vLLM's Python files, the packages that they import and this library's wheel into a folder: `install.sh GPU_BIN FOLDER`. `.ci/vllm --bundle` has packed them.
set -euo pipefail
from=$1 to=$2
mkdir -p "$to"
python3 -m pip install -q --upgrade --no-index --no-deps --no-compile --no-cache-dir --target "$to" "$from"/vllm/*.whl "$from"/attn_kv-*.whl
tar xJf "$from/vllm/vllm.tar.xz" -C "$to"
cp "$(dirname "$0")/gpu_library.py" "$to/vllm/_C_stable_libtorch.py"
# Operators of the compiled library are left out of the choices.
sed -i 's/\["vllm_c", "native"\]/["native"]/' "$to/vllm/platforms/cuda.py"
# Once for all processes, each of which would compile thousands of files. Some are no Python of this version.
python3 -m compileall -q -j 0 "$to" >/dev/null 2>&1 || true
