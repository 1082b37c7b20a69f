#!/usr/bin/env bash
# Programs for NCCL, unmodified, over unisono's libnccl.so.2, on a machine with GPUs.
#
#   scripts/gpu/nccl_clients.sh LIBRARY [OUT]
#
# LIBRARY is libnccl.so.2; OUT a folder for the logs. NCCL_TESTS, if set, is a folder with the sources of nccl-tests, and
# SUBJECTS those of torch_client.py, if not all. What the machine lacks is skipped. A line for each client; fails if one did.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
library=$(realpath "$1")
out=$(realpath -m "${2:-$here/build/nccl-clients}")
mkdir -p "$out/lib"
# Loaders look for this name.
cp "$library" "$out/lib/libnccl.so.2"
ln -sf libnccl.so.2 "$out/lib/libnccl.so"
ours=$out/lib/libnccl.so.2
gpus=$(nvidia-smi --list-gpus | wc -l)
# NVIDIA's, for the losses: multicast is off on these machines.
export NCCL_NVLS_ENABLE=0
wrong=0

# client NAME SECONDS COMMAND...
client() {
    local name=$1 seconds=$2 status=0
    shift 2
    timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1 || status=$?
    grep -E "^(torch|cupy|ctypes|losses)" "$out/$name.log"
    if [ "$status" = 0 ]; then
        echo "== $name: ok"
    else
        echo "== $name: FAILED ($status)"
        tail -n 25 "$out/$name.log"
        wrong=$((wrong + 1))
    fi
}

have() { python3 -c "import $1" 2>/dev/null; }

torchrun() { python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"; }
export -f torchrun
export gpus

client ctypes 60 python3 "$here/c_tests/nccl_python.py" "$ours" "$gpus" cuda

if have torch; then
    client torch 150 bash -c "LD_PRELOAD=$ours torchrun '$here/scripts/gpu/torch_client.py' --expect '$out' --losses '$out/ours.json' ${SUBJECTS:-}"
    client torch-nvidia 100 bash -c "torchrun '$here/scripts/gpu/torch_client.py' --losses '$out/theirs.json' ddp fsdp"
    client losses 20 python3 - "$out/ours.json" "$out/theirs.json" <<'EOF'
import json, sys
ours, theirs = (json.load(open(path)) for path in sys.argv[1:])
for name, losses in theirs.items():
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours[name], losses))
    print(f"losses {name}: {len(losses)} steps, {losses[0]:.4f} to {losses[-1]:.4f}, largest difference {worst:.1e} of the loss")
    assert worst < 1e-4, (ours[name], losses)
EOF
else
    echo "== torch: skipped, not installed"
fi

if have cupy; then
    client cupy 130 env LD_PRELOAD="$ours" python3 "$here/scripts/gpu/cupy_client.py" "$gpus"
else
    echo "== cupy: skipped, not installed"
fi

# nccl-tests: compiled with our header and, since it has kernels for the device API, NVIDIA's headers of that, which include
# ours. A line for each program and way: ranks of one thread, a thread for each, registered buffers, captured graphs.
nvidia=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/include")' 2>/dev/null)
if [ -n "${NCCL_TESTS:-}" ] && command -v nvcc >/dev/null && [ -f "$nvidia/nccl_device.h" ]; then
    mkdir -p "$out/nccl/include" "$out/nccl/lib"
    cp -r "$nvidia"/* "$out/nccl/include/"
    cp "$here/include/unisono/nccl.h" "$out/nccl/include/"
    cp -P "$out/lib/"* "$out/nccl/lib/"
    cuda=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")
    client nccl-tests-build 240 make -C "$NCCL_TESTS" -j 32 MPI=0 NCCL_HOME="$out/nccl" CUDA_HOME="$cuda" \
        BUILDDIR="$out/nccl-tests" NVCC_GENCODE="-gencode=arch=compute_90,code=sm_90"
    # They have an ncclGetLastError of their own, which knows nothing.
    export LD_LIBRARY_PATH=$out/lib NCCL_DEBUG=WARN
    for program in "$out"/nccl-tests/*_perf; do
        name=$(basename "$program" _perf)
        check() { client "nccl-tests-$name$1" 60 "$program" -b 8 -e 4M -f 16 -n 2 -w 1 "${@:2}"; }
        check -all-types -g "$gpus" -o all -d all
        check -threads -t "$gpus" -g 1
        check -graph -g "$gpus" -G 2
        check -registered -g "$gpus" -R 1
        check -windows -g "$gpus" -R 2
        grep -hE "Out of bounds" "$out"/nccl-tests-"$name"-*.log | sort | uniq -c
    done
else
    echo "== nccl-tests: skipped: NCCL_TESTS names no sources, or nvcc or NVIDIA's nccl_device.h is missing"
fi

[ "$wrong" = 0 ] && echo "all clients: ok" || echo "$wrong clients failed"
[ "$wrong" = 0 ]
