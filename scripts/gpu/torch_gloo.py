#!/usr/bin/env python3
"""Measures PyTorch's gloo on CUDA tensors: the peer of `unisono-bench --device`. With --host, on tensors in host memory.

    python3 scripts/gpu/torch_gloo.py --ranks 2 --operations allreduce,broadcast --sizes 4K,1M,64M

Prints "operation bytes p50_us p99_us" lines, which is what `unisono-bench --peer` reads: sizes are counted as there (of all
blocks together for allgather, reduce_scatter and alltoall), and an iteration's time is the slowest rank's. Each iteration
ends with a synchronisation of the device. Rank r has GPU r modulo their number. gloo sends no CUDA tensors: it hands their
addresses to the socket ("writev: Bad address"), so sendrecv goes by pinned tensors that are copied in an iteration. What else gloo
cannot do on CUDA tensors is told on stderr and left out.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

OPERATIONS = ["allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall", "sendrecv", "sparse_allreduce"]
# Values of a row of a sparse tensor, as there.
ROW = 64


def parse_bytes(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1].upper() in units else int(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--operations", default="allreduce", help="of " + ",".join(OPERATIONS))
    parser.add_argument("--sizes", default="4K,1M,16M,64M", help="bytes, with K, M or G")
    parser.add_argument("--host", action="store_true", help="tensors in host memory")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for each case")
    parser.add_argument("--json", help="write the times to this file, too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.operations.split(",")) - set(OPERATIONS)
    if unknown:
        parser.error(f"no such operation: {', '.join(sorted(unknown))}")
    return options


def start_ranks(options):
    """Runs the ranks as processes of their own, and answers the worst exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--port", str(port)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.ranks)]
    try:
        return max(abs(rank.wait()) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()


def call(torch, dist, name, count, device, rank, size):
    """What one iteration does, for `count` elements in all."""
    block = max(count // size, 1)
    if name in ("allreduce", "broadcast", "reduce"):
        tensor = torch.zeros(max(count, 1), device=device)
        return {
            "allreduce": lambda: dist.all_reduce(tensor),
            "broadcast": lambda: dist.broadcast(tensor, 0),
            "reduce": lambda: dist.reduce(tensor, 0),
        }[name]
    if name == "sparse_allreduce":
        # Half of a rank's rows are also the next rank's. The result takes the input's place, so each call has a copy of it.
        rows = max(count // ROW, 1)
        first = rank * ((rows + 1) // 2)
        indices = torch.arange(first + rows - 1, first - 1, -1, device=device).unsqueeze(0)
        tensor = torch.sparse_coo_tensor(indices, torch.ones(rows, ROW, device=device), (rows * (size + 1), ROW))
        return lambda: dist.all_reduce(tensor.clone())
    one = torch.zeros(block, device=device)
    all_blocks = torch.zeros(block * size, device=device)
    parts = list(all_blocks.split(block))
    other = torch.zeros_like(all_blocks)
    if name == "allgather":
        return lambda: dist.all_gather(parts, one)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(one, all_blocks)
    if name == "alltoall":
        return lambda: dist.all_to_all_single(other, all_blocks)
    tensor, received = torch.zeros(max(count, 1), device=device), torch.zeros(max(count, 1), device=device)
    out, into = (torch.empty(tensor.shape, pin_memory=True) for _ in range(2))

    def exchange():
        out.copy_(tensor)
        send = dist.isend(out, (rank + 1) % size)
        dist.recv(into, (rank - 1) % size)
        received.copy_(into, non_blocking=True)
        send.wait()

    return exchange


def measure(torch, dist, run, budget, device):
    """Seconds of each iteration, the slowest rank's."""

    def once():
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    def slowest(times):
        tensor = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    once()
    dist.barrier()
    estimate = slowest([once()])[0]
    dist.barrier()
    return sorted(slowest([once() for _ in range(int(min(max(budget / estimate, 5), 2000)))]))


def run_rank(options):
    import torch
    import torch.distributed as dist

    rank, size = options.rank, options.ranks
    if options.host:
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", options.port, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = []
    for name in options.operations.split(","):
        for asked in map(parse_bytes, options.sizes.split(",")):
            try:
                times = measure(
                    torch, dist, call(torch, dist, name, asked // 4, device, rank, size), options.budget, device
                )
            except (RuntimeError, NotImplementedError, ValueError) as error:
                if rank == 0:
                    print(f"torch_gloo.py: {name}: {str(error).splitlines()[0]}", file=sys.stderr)
                break
            p50, p99 = (times[round((len(times) - 1) * part)] * 1e6 for part in (0.5, 0.99))
            results.append({"operation": name, "bytes": asked, "p50_us": p50, "p99_us": p99, "iterations": len(times)})
            if rank == 0:
                print(f"{name} {asked} {p50:.2f} {p99:.2f}", flush=True)
    if rank == 0 and options.json:
        with open(options.json, "w") as file:
            json.dump({"peer": "torch gloo", "torch": torch.__version__, "ranks": size, "results": results}, file, indent=2)
    dist.barrier()
    dist.destroy_process_group()


def main():
    options = parse_arguments()
    if options.rank is None:
        return start_ranks(options)
    # Others in the job may have their own ideas of where ranks meet.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    run_rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
