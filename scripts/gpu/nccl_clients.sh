#!/usr/bin/env bash
# Programs for NCCL, unmodified, over unisono's libnccl.so.2, on a machine with GPUs.
#
#   scripts/gpu/nccl_clients.sh LIBRARY [OUT]
#
# LIBRARY is libnccl.so.2; OUT a folder for the logs. NCCL_TESTS, if set, is a folder with the sources of nccl-tests, which are
# built against include/unisono/nccl.h. What the machine lacks is skipped. A line for each client; fails if one did.
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

if [ -n "${NCCL_TESTS:-}" ] && command -v nvcc >/dev/null; then
    mkdir -p "$out/nccl/include" "$out/nccl/lib"
    cp "$here/include/unisono/nccl.h" "$out/nccl/include/"
    cp -P "$out/lib/"* "$out/nccl/lib/"
    client nccl-tests-build 300 make -C "$NCCL_TESTS" -j 16 MPI=0 NCCL_HOME="$out/nccl" BUILDDIR="$out/nccl-tests" \
        NVCC_GENCODE="-gencode=arch=compute_90,code=sm_90"
    for program in "$out"/nccl-tests/*_perf; do
        name=$(basename "$program" _perf)
        client "nccl-tests-$name-g" 60 env LD_LIBRARY_PATH="$out/lib" "$program" -b 8 -e 4M -f 8 -g "$gpus" -n 5 -w 1 -o all -d all
        client "nccl-tests-$name-t" 60 env LD_LIBRARY_PATH="$out/lib" "$program" -b 8 -e 4M -f 8 -t "$gpus" -g 1 -n 5 -w 1
    done
else
    echo "== nccl-tests: skipped, NCCL_TESTS names no sources"
fi

[ "$wrong" = 0 ] && echo "all clients: ok" || echo "$wrong clients failed"
[ "$wrong" = 0 ]
