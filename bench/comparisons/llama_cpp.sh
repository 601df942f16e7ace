#!/bin/sh
# Build llama.cpp's llama-batched-bench, llama-quantize and RPC server in a folder outside the tree:
#
#     bench/comparisons/llama_cpp.sh DIR            for the CPU of this machine
#     bench/comparisons/llama_cpp.sh DIR avx512     for any CPU with AVX-512, VNNI and VBMI
#
# The sources are those of the package llama-cpp-python. The programs are static, so DIR/bin works on
# machines with another C library. JOBS is the number of compilers at once, VERSION that of the package.
set -eu
case ${1:-} in '' | -*) echo "usage: $0 DIR [avx512]" >&2; exit 2 ;; esac
dir=$1 kind=${2:-native} version=${VERSION:-0.3.36}
mkdir -p "$dir"
cd "$dir"

if [ ! -d sources ]; then
    python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python "llama-cpp-python==$version"
    tar xzf "llama_cpp_python-$version.tar.gz"
    mv "llama_cpp_python-$version/vendor/llama.cpp" sources
fi
if [ ! -d tools ]; then
    python3 -m pip install --quiet --target tools cmake ninja
fi
export PYTHONPATH="$PWD/tools" PATH="$PWD/tools/bin:$PATH"

flags=-DGGML_NATIVE=ON
if [ "$kind" = avx512 ]; then
    flags='-DGGML_NATIVE=OFF'
    for set in SSE42 AVX AVX2 BMI2 FMA F16C AVX512 AVX512_VBMI AVX512_VNNI; do flags="$flags -DGGML_$set=ON"; done
fi
# shellcheck disable=SC2086
cmake -S sources -B build -G Ninja -DCMAKE_BUILD_TYPE=Release $flags -DGGML_RPC=ON -DGGML_CCACHE=OFF \
    -DBUILD_SHARED_LIBS=OFF -DCMAKE_EXE_LINKER_FLAGS=-static \
    -DOpenMP_gomp_LIBRARY="$(${CC:-cc} -print-file-name=libgomp.a)" -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
cmake --build build -j "${JOBS:-2}" --target llama-batched-bench llama-quantize ggml-rpc-server
mkdir -p bin
cp build/bin/llama-batched-bench build/bin/llama-quantize build/bin/*rpc-server bin/
strip bin/*
echo "$PWD/bin"
