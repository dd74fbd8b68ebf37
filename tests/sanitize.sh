#!/usr/bin/env bash
# The native tests under the address and undefined-behaviour sanitizers, in a build of their own. Any finding ends the run.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/sanitize
python=.venv/bin/python
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTRICORN_SANITIZE=ON \
    -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" -DPython_EXECUTABLE="$PWD/$python" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >/dev/null
.venv/bin/ninja -C "$build" | tail -n 1

# A copy of the package beside the sanitized extension; -S keeps the installed one out of the way.
rm -rf "$build/python"
mkdir -p "$build/python"
cp -r src/tricorn "$build/python/tricorn"
rm -f "$build"/python/tricorn/_native*.so
cp "$build"/_native*.so "$build/python/tricorn/"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
export PYTHONPATH="$PWD/$build/python:$site:$PWD/tests" PYTHONDONTWRITEBYTECODE=1
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1  # Python itself leaks at its end
LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libubsan.so)" \
    "$python" -S -m pytest -p no:cacheprovider -q tests/test_native.py tests/test_native_sampling.py "$@"
