#!/usr/bin/env bash
# Programs for NCCL, unmodified, over unisono's libnccl.so.2, on a machine with GPUs; in some five minutes on four.
#
#   scripts/gpu/nccl_clients.sh LIBRARY [OUT]
#
# LIBRARY is libnccl.so.2; OUT a folder for the logs. NCCL_TESTS, if set, is a folder with the sources of nccl-tests, or with
# the programs that they compile to. CLIENTS, such as "ctypes torch", says which clients, if not all; SUBJECTS those of
# torch_client.py; PROGRAMS, such as "all_reduce gather", and WAYS, such as "graph windows", those of nccl-tests, of which
# LANES (3) run at a time. PyTorch's own tests run if "torch-tests" is named: those of its wheel, and of TORCH_TESTS, files of its
# sources; what fails counts if it does not over NVIDIA's library. What the machine lacks is skipped, and said. A line for each client,
# with its seconds; fails if one did, if none ran, and for a name that is no client's.
# A client that takes too long is told with the stacks of its threads (stacks.py), in OUT/NAME.stacks or OUT/stacks-PID.
set -uo pipefail

# usage: what stands above
usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
if [ ! -f "${1:-}" ]; then
    usage >&2
    exit 2
fi

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
failed=$out/failed
ran=$out/ran
skipped=$out/skipped
: >"$failed" >"$ran" >"$skipped"

# Where programs that watch themselves tell where they were.
export STACKS_OUT=$out
# How long after its time a client may be looked at.
stacks_seconds=50

# client NAME SECONDS COMMAND...
client() {
    local name=$1 seconds=$2 status=0 start=$SECONDS pid
    shift 2
    echo "$name" >>"$ran"
    timeout -k 5 "$((seconds + stacks_seconds))" "$@" >"$out/$name.log" 2>&1 </dev/null &
    pid=$!
    # Ends when the client does.
    python3 "$here/scripts/gpu/stacks.py" --after "$seconds" --out "$out/$name.stacks" "$pid" </dev/null &
    # It has a process group of its own: who ends this script ends it only so.
    trap "kill $pid 2>/dev/null; exit 143" INT TERM
    wait "$pid" || status=$?
    trap - INT TERM
    # In one piece, since several may end at once.
    echo "$(
        grep -hE "^(torch|cupy|jax|nccl4py|ctypes|contract|losses|medley)" "$out/$name.log"
        if [ "$status" = 0 ]; then
            echo "== $name: ok, $((SECONDS - start)) s"
        else
            echo "== $name: FAILED ($status), $((SECONDS - start)) s"
            for told in "$out/$name.stacks" "$out"/stacks-*; do
                [ -e "$told" ] && echo "stacks: $told"
            done
            tail -n "${FAILURE_LINES:-25}" "$out/$name.log"
            echo "$name" >>"$failed"
        fi
    )"
}

# lane COMMAND...: beside others, at most LANES of them. `wait` ends when all have.
lane() {
    while [ "$(jobs -rp | wc -l)" -ge "${LANES:-3}" ]; do wait -n; done
    "$@" &
}

for name in ${CLIENTS:-}; do
    case $name in
        ctypes | torch | hosts | latency | coalesced | torch-tests | nccl4py | cupy | jax | contracts | groups | medley | nccl-tests) ;;
        *) echo "== $name: FAILED, there is no such client"; echo "$name" >>"$failed" ;;
    esac
done

wanted() { case " ${CLIENTS:-$1} " in *" $1 "*) ;; *) return 1 ;; esac; }

# skip CLIENT WHY...
skip() {
    echo "== $1: skipped, ${*:2}"
    echo "$1" >>"$skipped"
}

# lacks CLIENT MODULE: whether the client cannot run, since Python has no such module.
lacks() {
    ! python3 -c "import $2" 2>/dev/null && skip "$1" "there is no $2 for Python"
}

torchrun() { python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"; }
export -f torchrun
export gpus

wanted ctypes && client ctypes 60 python3 "$here/c_tests/nccl_python.py" "$ours" "$gpus" cuda

if wanted torch && ! lacks torch torch; then
    client torch 150 bash -c "LD_PRELOAD=$ours torchrun '$here/scripts/gpu/torch_client.py' --expect '$out' --losses '$out/ours.json' ${SUBJECTS:-}"
    client torch-nvidia 100 bash -c "torchrun '$here/scripts/gpu/torch_client.py' --losses '$out/theirs.json' ddp fsdp"
    client losses 20 python3 - "$out/ours.json" "$out/theirs.json" <<'EOF2'
import json, sys
ours, theirs = (json.load(open(path)) for path in sys.argv[1:])
for name, losses in theirs.items():
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours[name], losses))
    print(f"losses {name}: {len(losses)} steps, {losses[0]:.4f} to {losses[-1]:.4f}, largest difference {worst:.1e} of the loss")
    assert worst < 1e-4, (ours[name], losses)
EOF2
fi

# Ranks that take themselves for those of two hosts: a GPU on each, and two on each, which share the GPUs if there are two.
if wanted hosts && ! lacks hosts torch; then
    for ranks in 2 4; do
        client "hosts-$ranks" 100 bash -c "LD_PRELOAD=$ours torchrun --nproc-per-node $ranks '$here/scripts/gpu/torch_client.py' \
            --expect '$out' --hosts 2 collectives types groups ddp fsdp uncapturable abort"
    done
fi

# How long an eager call takes from PyTorch, and a group of them.
for subject in latency coalesced; do
    wanted $subject && ! lacks $subject torch || continue
    client $subject 60 bash -c "LD_PRELOAD=$ours torchrun '$here/scripts/gpu/torch_client.py' --expect '$out' $subject"
    client $subject-nvidia 60 bash -c "torchrun '$here/scripts/gpu/torch_client.py' $subject"
done

# own_tests NAME SECONDS [FILE]
own_tests() {
    local name=$1 seconds=$2
    shift 2
    local tests="python3 '$here/scripts/gpu/torch_tests.py' --lanes 10 $*"
    client "$name" "$((2 * seconds))" bash -c "
        LD_PRELOAD=$ours timeout $seconds $tests --expect '$out' --out '$out/$name' --failed '$out/$name.failed' && exit
        [ -s '$out/$name.failed' ] || exit 1
        timeout $seconds $tests --only '$out/$name.failed' --out '$out/$name-nvidia' --failed '$out/$name-nvidia.failed'
        [ -e '$out/$name-nvidia.failed' ] && ! grep -vxF -f '$out/$name-nvidia.failed' '$out/$name.failed'"
}
case " ${CLIENTS:-} " in *" torch-tests "*)
    lacks torch-tests expecttest || {
        own_tests torch-tests 300
        for file in ${TORCH_TESTS:-}; do own_tests "$(basename "$file" .py)" 300 "$(realpath "$file")"; done
    } ;;
esac

if wanted nccl4py && ! lacks nccl4py nccl.core; then
    client nccl4py 130 env LD_PRELOAD="$ours" python3 "$here/scripts/gpu/nccl4py_client.py" "$gpus" --expect "$out"
fi

if wanted cupy && ! lacks cupy cupy; then
    client cupy 130 env LD_PRELOAD="$ours" python3 "$here/scripts/gpu/cupy_client.py" "$gpus" --expect unisono
fi

if wanted jax && ! lacks jax jax; then
    if [ "$gpus" -gt 1 ]; then
        client jax 130 env LD_PRELOAD="$ours" python3 "$here/scripts/gpu/jax_client.py" "$gpus" --expect unisono
    else
        skip jax "with one GPU it calls no library"
    fi
fi

if wanted contracts && ! lacks contracts torch; then
    if [ "$gpus" -gt 1 ]; then
        client contracts 120 python3 "$here/scripts/gpu/nccl_contracts.py" "$ours"
        client contracts-apart 60 env UNISONO_P2P=0 python3 "$here/scripts/gpu/nccl_contracts.py" "$ours" streams joined circle
    else
        skip contracts "it needs two GPUs"
    fi
fi

# compiles CLIENT: whether it can be compiled here.
compiles() {
    command -v nvcc >/dev/null && return
    skip "$1" "there is no nvcc"
    return 1
}

# Groups of collectives, and how long they take: over ours and, where it is found, NVIDIA's.
nvidia=$(python3 -c '
import torch
print(next((line.split()[-1] for line in open("/proc/self/maps") if "libnccl.so.2" in line), ""))' 2>/dev/null)
if wanted groups && compiles groups; then
    client groups-build 60 nvcc -O2 -std=c++17 -I "$here/include/unisono" -o "$out/nccl_groups" "$here/scripts/gpu/nccl_groups.cu" \
        -L "$out/lib" -lnccl
    client groups 60 env LD_LIBRARY_PATH="$out/lib" "$out/nccl_groups"
    client groups-long 90 env LD_LIBRARY_PATH="$out/lib" "$out/nccl_groups" long
    [ -z "$nvidia" ] || client groups-nvidia 60 env LD_LIBRARY_PATH="$(dirname "$nvidia")" "$out/nccl_groups"
    [ -z "$nvidia" ] || client groups-nvidia-long 90 env LD_LIBRARY_PATH="$(dirname "$nvidia")" "$out/nccl_groups" long
fi

# Random programs, in every way that ranks may be; MEDLEY_SECONDS (10) of each, from program MEDLEY_SEED (1) on.
if wanted medley && compiles medley; then
    client medley-build 60 nvcc -O2 -std=c++17 -I "$here/include/unisono" -o "$out/nccl_medley" "$here/scripts/gpu/nccl_medley.cu" \
        -L "$out/lib" -lnccl
    medley() {
        local name=$1
        shift
        client "medley-$name" "$((${MEDLEY_SECONDS:-10} + 60))" env LD_LIBRARY_PATH="$out/lib" "$@" --seconds "${MEDLEY_SECONDS:-10}" --seed "${MEDLEY_SEED:-1}"
    }
    medley processes "$out/nccl_medley"
    medley threads "$out/nccl_medley" --threads
    medley windows "$out/nccl_medley" --windows
    medley trouble "$out/nccl_medley" --trouble
    medley trouble-threads "$out/nccl_medley" --trouble --threads
    medley hosts "$out/nccl_medley" --hosts 2 --no-graphs
    medley trouble-hosts "$out/nccl_medley" --hosts 2 --no-graphs --trouble
    medley apart UNISONO_P2P=0 "$out/nccl_medley" --no-graphs
    medley trouble-apart UNISONO_P2P=0 "$out/nccl_medley" --no-graphs --trouble
fi

# nccl-tests: compiled with our header and, since it has kernels for the device API, NVIDIA's headers of that, which include
# ours.
build_nccl_tests() {
    local nvidia cuda
    nvidia=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/include")' 2>/dev/null)
    command -v nvcc >/dev/null && [ -f "$nvidia/nccl_device.h" ] || return 1
    mkdir -p "$out/nccl/include" "$out/nccl/lib"
    cp -r "$nvidia"/* "$out/nccl/include/"
    cp "$here/include/unisono/nccl.h" "$out/nccl/include/"
    cp -P "$out/lib/"* "$out/nccl/lib/"
    cuda=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")
    client nccl-tests-build 240 make -C "$NCCL_TESTS" -j 32 MPI=0 NCCL_HOME="$out/nccl" CUDA_HOME="$cuda" \
        BUILDDIR="$out/nccl-tests" NVCC_GENCODE="-gencode=arch=compute_90,code=sm_90"
    programs=$out/nccl-tests
}

# nccl_test PROGRAM WAY OPTIONS...: every type and, where there is something to compute, operator, from 8 bytes to 2 MiB, in
# place and not, every result compared; fails too if it counts a wrong one and exits well, or leaves types out.
nccl_test() {
    local program=$1 way=$2 operators=sum
    shift 2
    case $program in *reduce*) operators=all ;; esac
    client "nccl-tests-$program-$way" 90 bash -c '"$@" && grep -q bfloat16 "$0" && grep -q f8e5m2 "$0" &&
        ! grep -q "Out of bounds values : [1-9]" "$0"' \
        "$out/nccl-tests-$program-$way.log" \
        "$programs/${program}_perf" -o $operators -d all -b 8 -e 2M -f 64 -n 1 -w 0 -p 1 "$@"
}

# Every program in every way: ranks of one thread, and a thread for each, which is quicker; captured graphs; registered
# buffers; windows; misaligned buffers. Those that compute take longest, having more operators.
nccl_tests() {
    local program way options
    for program in ${PROGRAMS:-all_reduce reduce_scatter reduce broadcast all_gather alltoall alltoallv gather scatter sendrecv hypercube}; do
        for way in ${WAYS:-group threads graph registered windows misaligned}; do
            if [ "$program-$way" = hypercube-group ] && [ "$gpus" -gt 2 ]; then
                # -g makes one group of all rounds: what the second round sends may not have been received yet.
                echo "== nccl-tests-hypercube-group: skipped, its rounds need an order that a group does not give"
                continue
            fi
            case $way in
                group) options="-g $gpus" ;;
                graph) options="-t $gpus -g 1 -G 2" ;;
                registered) options="-t $gpus -g 1 -R 1" ;;
                threads) options="-t $gpus -g 1" ;;
                windows) options="-t $gpus -g 1 -R 2" ;;
                misaligned) options="-t $gpus -g 1 -u 1" ;;
                *) echo "== nccl-tests: there is no way $way" | tee -a "$failed"; continue ;;
            esac
            lane nccl_test "$program" "$way" $options
        done
    done
    wait
}

programs=${NCCL_TESTS:-}
if ! wanted nccl-tests; then
    :
elif [ -z "$programs" ]; then
    skip nccl-tests "NCCL_TESTS names no folder"
elif [ -x "$programs/all_reduce_perf" ] || build_nccl_tests; then
    # They have an ncclGetLastError of their own, which knows nothing.
    export LD_LIBRARY_PATH=$out/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} NCCL_DEBUG=WARN
    nccl_tests
    grep -hE "Out of bounds" "$out"/nccl-tests-*.log | sort | uniq -c
else
    skip nccl-tests "nvcc or NVIDIA's nccl_device.h is missing"
fi

if [ -s "$failed" ]; then
    echo "$(wc -l <"$failed") clients failed:" $(cat "$failed")
    exit 1
fi
if [ ! -s "$ran" ]; then
    echo "no client ran; skipped:" $(cat "$skipped")
    exit 1
fi
if [ -s "$skipped" ]; then
    echo "all clients that ran: ok; skipped:" $(cat "$skipped")
else
    echo "all clients: ok"
fi
