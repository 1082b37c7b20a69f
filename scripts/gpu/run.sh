#!/usr/bin/env bash
# Runs everything in this bundle: run.sh [N], on all GPUs of this machine or on the first N; where CUDA_VISIBLE_DEVICES is
# set, on those, or on the first N of them. Each step has a time limit. The table of results comes last; it and the full log
# are left in $OUT, or in ./results. Exit status 1 if anything failed.
# STEPS='driver local' limits the run to the steps whose names begin so; RANKS=2 leaves out jobs of staged and relay with more
# ranks, which take minutes on two GPUs.

set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$here/results}
mkdir -p "$out"
log=$out/gpu-test.log
table=$out/gpu-test.txt
: >"$log"
: >"$table"

# The GPUs that programs here see, as CUDA_VISIBLE_DEVICES names them, one a line. As the driver reads it: what names no GPU
# ends the list.
visible() {
    local count
    count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || return 0
    if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
        seq 0 $((count - 1))
    else
        tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | awk -v count="$count" '
            { gsub(/[ \t]/, "") }
            !/^(GPU|MIG)-/ && !(/^[0-9]+$/ && $0 + 0 < count) { exit }
            { print }'
    fi
}

if [ -n "${1:-}" ]; then
    CUDA_VISIBLE_DEVICES=$(visible | head -n "$1" | paste -sd,)
    export CUDA_VISIBLE_DEVICES
fi
gpus=$(visible | wc -l)

have() { command -v "$1" >/dev/null 2>&1; }

wanted() {
    [ -z "${STEPS:-}" ] && return 0
    local start
    for start in $STEPS; do
        case $1 in "$start"*) return 0 ;; esac
    done
    return 1
}

# Streams hold each other up the least where each has a queue; one step is without.
export CUDA_DEVICE_MAX_CONNECTIONS=32

failures=0

# row NAME PASSED FAILED SKIPPED SECONDS [REMARK]
row() { printf '%-28s %6s %6s %7s %6s  %s\n' "$1" "$2" "$3" "$4" "$5" "${6:-}" | sed 's/ *$//' | tee -a "$table"; }

# step NAME LIMIT COMMAND...: one line of the table. Counts what a Rust test program says of itself; a program that says
# nothing of the kind is one test.
step() {
    local name=$1 limit=$2 start=$SECONDS status=0 passed failed skipped remark=
    shift 2
    wanted "$name" || return 0
    local part
    part=$(mktemp)
    timeout -k 10 "$limit" "$@" </dev/null >"$part" 2>&1 || status=$?
    { echo "== $name: $*"; cat "$part"; echo "== $name: exit status $status"; } >>"$log"
    read -r passed failed < <(awk '
        /^test result: / { passed += $4; failed += $6; found = 1 }
        END { print passed + 0, (found ? failed + 0 : -1) }' "$part")
    skipped=$(grep -c 'skipped: ' "$part")
    if [ "$failed" -lt 0 ]; then
        passed=$((status == 0))
        failed=$((status != 0))
    elif [ "$status" != 0 ] && [ "$failed" = 0 ]; then
        failed=1
    fi
    [ "$passed" -ge "$skipped" ] && passed=$((passed - skipped))
    [ "$status" != 124 ] && [ "$status" != 137 ] || remark="killed after $limit s"
    if [ "$failed" != 0 ]; then
        failures=$((failures + failed))
        remark="$remark $(grep -E '^    [a-z_:]+$' "$part" | sort -u | head -4 | tr -s '\n ' ' ')"
    fi
    row "$name" "$passed" "$failed" "$skipped" "$((SECONDS - start))" "$remark"
    [ "$failed" = 0 ] || { tail -n "${FAILURE_LINES:-40}" "$part"; }
    grep '^@ ' "$part" | cut -c3- | tee -a "$table"
    rm -f "$part"
}

# skip NAME WHY
skip() { ! wanted "$1" || row "$1" 0 0 1 0 "$2"; }

{ nvidia-smi -L; nvidia-smi topo -m; nvidia-smi --query-gpu=driver_version --format=csv,noheader | sort -u; uname -r; nproc; } \
    >>"$log" 2>&1
nvidia-smi -L 2>/dev/null | sed 's/ (UUID.*//' | cut -d: -f2 | sort | uniq -c | tee -a "$table"
[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || echo "$gpus of them: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES" | tee -a "$table"
row step passed failed skipped s

# One step for each module of the test program. One test after the other: see tests/gpu/main.rs.
gpu() { echo "$here/gpu" --test-threads=1 --nocapture "$@"; }
for module in $("$here/gpu" --list 2>/dev/null | sed -n 's/: test$//p' | sed -n 's/::.*//p' | sort -u); do
    # exchange has groups of eight, however many GPUs there are.
    step "$module" "$([ "$module" = exchange ] && echo 400 || echo 240)" $(gpu "$module::")
done

# As programs are started that know nothing of queues: couriers alone.
few() { echo env CUDA_DEVICE_MAX_CONNECTIONS=8 $(gpu "$@"); }
step few-queues 240 $(few queues:: staged::collectives hosts::hosts_compose algorithms:: sparse::tensors)

for transport in shm tcp; do
    step "gloo-$transport" 240 env "UNISONO_TRANSPORT=$transport" "$here/gloo_cuda"
done

# The way of machines whose GPUs do not reach each other.
if [ "$gpus" -gt 1 ]; then
    step apart-local 240 env UNISONO_P2P=0 $(gpu local::)
else
    skip apart-local "needs 2 GPUs"
fi

# More bytes, and more elements, than 32 bits count; what comes is looked at in its beginning, its middle and its end.
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | sort -n | head -n 1)
if [ "$gpus" -gt 1 ] && [ "${memory:-0}" -ge 60000 ]; then
    long() { echo "$here/unisono-bench" "$@" --device --ranks 2 --calls stream --sizes 4608M -d int8 -n 2 -w 0; }
    step long 120 $(long allreduce reduce reduce_scatter broadcast allgather alltoall gather scatter sendrecv)
    step long-apart 120 env UNISONO_P2P=0 $(long allreduce broadcast alltoall sendrecv)
else
    skip long "needs 2 GPUs of 60 GB"
fi

if have g++ && python3 -c 'import cupy' 2>/dev/null; then
    step kernels-check 240 python3 "$here/scripts/gpu/kernels_check.py" --quick
else
    skip kernels-check "needs python3 with cupy, and g++"
fi

if have compute-sanitizer; then
    sanitize() { echo compute-sanitizer --error-exitcode 86 --print-limit 20 --tool "$@"; }
    # Small ones, since it slows kernels down a lot. Errors that a test provokes are not the kernels'.
    step memcheck 240 $(sanitize memcheck --report-api-errors no) \
        $(gpu local::a_result local::more_pointers driver::kernels_load driver::bytes_go)
    step racecheck 240 $(sanitize racecheck) $(gpu local::a_result local::more_pointers driver::kernels_load)
else
    skip memcheck "needs compute-sanitizer"
fi

if "$here/unisono-bench" --help 2>/dev/null | grep -q -- --device; then
    step bench-local-broadcast 120 "$here/unisono-bench" local-broadcast --pointers 8
    step bench-local-reduce 120 "$here/unisono-bench" local-reduce --pointers 8
    for ranks in 1 2 4 8; do
        [ "$ranks" -le "$gpus" ] || continue
        step "bench-allreduce-$ranks" 120 "$here/unisono-bench" allreduce --device --ranks "$ranks"
        step "bench-broadcast-$ranks" 120 "$here/unisono-bench" broadcast --device --ranks "$ranks"
        step "bench-several-$ranks" 120 "$here/unisono-bench" allreduce reduce broadcast --device --ranks "$ranks" --pointers 2
        step "bench-sparse-$ranks" 120 "$here/unisono-bench" sparse_allreduce --device --ranks "$ranks" --sizes 64K,1M,16M
    done
fi

[ "$failures" = 0 ] && echo "all passed" || echo "$failures failed"
[ "$failures" = 0 ]
