"""PyTorch over whatever libnccl.so.2 is loaded: every collective of torch.distributed, training, graphs, trouble.

    torchrun --nproc-per-node N torch_client.py [--losses FILE] [--expect PART] [--hosts H] [SUBJECT ...]

Subjects: collectives, types, groups, ddp, fsdp, graphs, abort; and, which are run only if named, latency, coalesced and
uncapturable. Each prints a line of rank 0, latency and coalesced one for each size. --losses writes the losses of the training
subjects, to be compared with those of another library; --expect is a part of the path of the library that must be in use. With
--hosts the ranks take themselves for those of so many hosts, equally many on each. Ranks share the GPUs that there are. A subject
that takes longer than --limit seconds ends the rank; where its threads were is told in a file of STACKS_OUT, a folder, or on stderr.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import stacks

COUNTS = (1, 1000, 1 << 20)


def equal(name, got, wanted):
    if not torch.equal(got, wanted):
        wrong = (got != wanted).nonzero().flatten()
        raise AssertionError(f"{name}: {wrong.numel()} of {got.numel()} are wrong, the first at {wrong[0].item()}: "
                             f"{got.flatten()[wrong[0]].item()}, not {wanted.flatten()[wrong[0]].item()}")


def values(rank, count, dtype=torch.float32, device="cuda"):
    return ((torch.arange(count, device=device) % 13) + rank + 1).to(dtype)


def collectives(rank, size):
    ranks = range(size)
    for count in COUNTS:
        all_values = [values(r, count) for r in ranks]
        total = torch.stack(all_values).sum(0)
        x = values(rank, count)
        dist.all_reduce(x)
        equal("all_reduce", x, total)
        x = values(rank, count)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        equal("all_reduce max", x, all_values[-1])
        x = values(rank, count)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        equal("all_reduce avg", x, total / size)
        for root in ranks:
            x = values(rank, count)
            dist.broadcast(x, root)
            equal("broadcast", x, all_values[root])
            x = values(rank, count)
            dist.reduce(x, root)
            if rank == root:
                equal("reduce", x, total)
        out = [torch.empty(count, device="cuda") for _ in ranks]
        dist.all_gather(out, values(rank, count))
        for r in ranks:
            equal("all_gather", out[r], all_values[r])
        flat = torch.empty(count * size, device="cuda")
        dist.all_gather_into_tensor(flat, values(rank, count))
        equal("all_gather_into_tensor", flat, torch.cat(all_values))
        block = torch.empty(count, device="cuda")
        dist.reduce_scatter_tensor(block, torch.cat([values(rank + 3 * r, count) for r in ranks]))
        equal("reduce_scatter_tensor", block, torch.stack([values(r + 3 * rank, count) for r in ranks]).sum(0))
        dist.reduce_scatter(block, [values(rank + 3 * r, count) for r in ranks])
        equal("reduce_scatter", block, torch.stack([values(r + 3 * rank, count) for r in ranks]).sum(0))
        dist.all_to_all_single(flat, torch.cat([values(rank + 5 * r, count) for r in ranks]))
        equal("all_to_all_single", flat, torch.cat([values(r + 5 * rank, count) for r in ranks]))
        dist.all_to_all(out, [values(rank + 5 * r, count) for r in ranks])
        for r in ranks:
            equal("all_to_all", out[r], values(r + 5 * rank, count))
        dist.gather(values(rank, count), out if rank == 0 else None, dst=0)
        if rank == 0:
            equal("gather", torch.stack(out), torch.stack(all_values))
        dist.scatter(block, all_values if rank == 0 else None, src=0)
        equal("scatter", block, values(rank, count))
        following, previous = (rank + 1) % size, (rank - 1) % size
        message = torch.empty(count, device="cuda")
        for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, values(rank, count), following),
            dist.P2POp(dist.irecv, message, previous),
        ]):
            work.wait()
        equal("batch_isend_irecv", message, values(previous, count))
        if size > 1:
            if rank == 0:
                dist.send(values(7, count), 1)
            elif rank == 1:
                dist.recv(message, 0)
                equal("send, recv", message, values(7, count))
        work = dist.all_reduce(x := values(rank, count), async_op=True)
        work.wait()
        equal("all_reduce async", x, total)
    uneven_in, uneven_out = [r + 1 for r in ranks], [rank + 1] * size
    source = torch.cat([torch.full((r + 1,), float(10 * rank + r), device="cuda") for r in ranks])
    flat = torch.empty(sum(uneven_out), device="cuda")
    dist.all_to_all_single(flat, source, uneven_out, uneven_in)
    wanted = torch.cat([torch.full((rank + 1,), float(10 * r + rank), device="cuda") for r in ranks])
    equal("all_to_all_single uneven", flat, wanted)
    # Views that begin anywhere.
    memory = torch.zeros(1003, device="cuda")
    memory[1:1002] = values(rank, 1001)
    dist.all_reduce(memory[1:1002])
    equal("all_reduce of a view", memory[1:1002], torch.stack([values(r, 1001) for r in ranks]).sum(0))
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in ranks], objects
    # What is short is one launch; what is long stands between.
    counts = [100 + i for i in range(17)] + [1 << 20] + [1 + 7000 * i for i in range(5)]
    with dist._coalescing_manager(device=torch.device("cuda")):
        many = [values(rank, n) for n in counts]
        for x in many:
            dist.all_reduce(x)
    for n, x in zip(counts, many):
        equal("coalesced all_reduce", x, torch.stack([values(r, n) for r in ranks]).sum(0))
    counts = counts[12:]
    gathered = [torch.empty(size * n, device="cuda") for n in counts]
    with dist._coalescing_manager(device=torch.device("cuda")):
        for n, x in zip(counts, gathered):
            dist.all_gather_into_tensor(x, values(rank, n))
    for n, x in zip(counts, gathered):
        equal("coalesced all_gather_into_tensor", x, torch.cat([values(r, n) for r in ranks]))
    scattered = [torch.empty(n, device="cuda") for n in counts]
    with dist._coalescing_manager(device=torch.device("cuda")):
        for n, x in zip(counts, scattered):
            dist.reduce_scatter_tensor(x, values(rank, size * n))
    for n, x in zip(counts, scattered):
        whole = torch.stack([values(r, size * n) for r in ranks]).sum(0)
        equal("coalesced reduce_scatter_tensor", x, whole[rank * n : rank * n + n])
    dist.all_reduce(torch.empty(0, device="cuda"))
    from torch._C._distributed_c10d import _make_nccl_premul_sum as premul_sum

    scaled = values(rank, 1000)
    dist.all_reduce(scaled, op=premul_sum(0.5))
    equal("premul_sum", scaled, torch.stack([values(r, 1000) * 0.5 for r in ranks]).sum(0))
    scaled = values(rank, 1000)
    dist.all_reduce(scaled, op=premul_sum(torch.full((1,), rank + 1.0, device="cuda")))
    equal("premul_sum of a tensor", scaled, torch.stack([values(r, 1000) * (r + 1) for r in ranks]).sum(0))


def types(rank, size):
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
                  torch.float64):
        for op, name in ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.PRODUCT, "prod"), (dist.ReduceOp.MIN, "amin"),
                         (dist.ReduceOp.MAX, "amax")):
            x = values(rank, 3001, dtype) % 3
            wanted = getattr(torch.stack([values(r, 3001, dtype) % 3 for r in range(size)]).to(torch.float64), name)(0)
            dist.all_reduce(x, op=op)
            equal(f"{dtype} {name}", x, wanted.to(dtype))
    flags = torch.tensor([rank == 0, True, False], device="cuda")
    dist.broadcast(flags, 0)
    equal("bool", flags, torch.tensor([True, True, False], device="cuda"))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        out = torch.empty(64 * size, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(out, torch.full((64,), rank + 1.0, device="cuda").to(dtype))
        equal(str(dtype), out.float(), torch.arange(1, size + 1, device="cuda").float().repeat_interleave(64))


def groups(rank, size):
    pairs = [dist.new_group([first, (first + 1) % size]) for first in range(size)] if size > 2 else []
    everyone = dist.new_group(list(range(size)))
    for first, pair in enumerate(pairs):
        members = sorted({first, (first + 1) % size})
        if rank in members:
            x = values(rank, 5000)
            dist.all_reduce(x, group=pair)
            equal("pair", x, sum(values(r, 5000) for r in members))
    # Two communicators on two streams, whose calls overlap.
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    results = []
    torch.cuda.synchronize()
    for round in range(20):
        with torch.cuda.stream(one):
            a = values(rank + round, 200_000)
            dist.all_reduce(a)
        with torch.cuda.stream(two):
            b = values(rank + 2 * round, 100_000)
            dist.all_reduce(b, group=everyone)
        results.append((a, b))
    torch.cuda.synchronize()
    for round, (a, b) in enumerate(results):
        equal("stream one", a, sum(values(r + round, 200_000) for r in range(size)))
        equal("stream two", b, sum(values(r + 2 * round, 100_000) for r in range(size)))
    # One communicator on two streams.
    results = []
    for round in range(20):
        with torch.cuda.stream(one if round % 2 else two):
            a = values(rank + round, 50_000)
            dist.all_reduce(a)
            results.append(a)
    torch.cuda.synchronize()
    for round, a in enumerate(results):
        equal("both streams", a, sum(values(r + round, 50_000) for r in range(size)))
    dist.destroy_process_group(everyone)


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 512), torch.nn.GELU(),
                               torch.nn.Linear(512, 10)).cuda()


def train(wrapped, rank, steps=30):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 256, generator=generator).cuda()
        loss = torch.nn.functional.cross_entropy(wrapped(x), (x[:, :10]).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shared = loss.detach().clone()
        dist.all_reduce(shared, op=dist.ReduceOp.AVG)
        losses.append(shared.item())
    assert losses[-1] < losses[0], losses
    return losses


def ddp(rank, size):
    wrapped = torch.nn.parallel.DistributedDataParallel(model(), device_ids=[torch.cuda.current_device()],
                                                        bucket_cap_mb=1)
    losses = train(wrapped, rank)
    checksum = torch.stack([p.detach().double().sum() for p in wrapped.parameters()])
    all_sums = torch.empty(size * checksum.numel(), dtype=torch.float64, device="cuda")
    dist.all_gather_into_tensor(all_sums, checksum)
    equal("ddp parameters", all_sums, checksum.repeat(size))
    return losses


def fsdp(rank, size):
    from torch.distributed.fsdp import fully_shard

    wrapped = model()
    for layer in wrapped:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(wrapped)
    return train(wrapped, rank)


def graphs(rank, size):
    x = values(rank, 4096)
    result = torch.empty_like(x)
    dist.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(x)
        dist.all_reduce(result)
    for round in range(10):
        x.copy_(values(rank + round, 4096))
        graph.replay()
        eager = values(rank, 100)
        dist.all_reduce(eager)
        equal("replay", result, sum(values(r + round, 4096) for r in range(size)))
        equal("eager between replays", eager, sum(values(r, 100) for r in range(size)))


def uncapturable(rank, size):
    """What needs the host while it runs is refused in a capture, by a text, and leaves the communicator as it was."""
    x = values(rank, 4096)
    dist.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            dist.all_reduce(x)
        raise AssertionError("it was captured")
    except RuntimeError as error:
        # The end of such a capture may be an error of its own.
        told = [str(error), str(error.__context__)]
        if not any("cannot be captured" in text for text in told):
            raise
    del graph
    torch.cuda.synchronize()
    dist.all_reduce(x)
    equal("after the refusal", x, sum(values(r, 4096) for r in range(size)))


def abort(rank, size):
    """A call that nobody answers is aborted; a new group works."""
    # Outlives the group. A port of their own, chosen beforehand, could be somebody else's by then.
    store = dist.PrefixStore("after the abort", dist.distributed_c10d._get_default_store())
    if size > 1:
        try:
            if rank == 0:
                dist.all_reduce(torch.ones(1000, device="cuda"), async_op=True)
        except dist.DistBackendError:
            # What goes through the host is waited for in the call, which hears of the others' abort.
            if "NCCL_HOSTID" not in os.environ and os.environ.get("UNISONO_P2P") != "0":
                raise
        time.sleep(1)
        start = time.monotonic()
        dist.distributed_c10d._abort_process_group()
        assert time.monotonic() - start < 10, "the abort took long"
    else:
        dist.destroy_process_group()
    torch.cuda.synchronize()
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    x = values(rank, 1000)
    dist.all_reduce(x)
    equal("after the abort", x, sum(values(r, 1000) for r in range(size)))


def clock(rank, what, call, calls):
    """Prints how long a call takes when calls follow each other: by the clock, of the slowest rank."""
    times = []
    for _ in range(30):
        dist.barrier()
        torch.cuda.synchronize()
        call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e6)
    # The first ones load and warm up.
    times = torch.tensor(sorted(times[5:]), device="cuda")
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    median, least = times[len(times) // 2].item(), times[0].item()
    if rank == 0:
        print(f"torch latency {what}: {median:.1f} us a call, at least {least:.1f}", flush=True)


def latency(rank, size):
    """How long an eager call takes."""
    for name, call in (("all_reduce", dist.all_reduce), ("broadcast", lambda x: dist.broadcast(x, 0))):
        for count in (2, 1024, 8192, 65536):
            x = torch.zeros(count, device="cuda")
            clock(rank, f"{name} of {4 * count} bytes", lambda: call(x), 200)


def coalesced(rank, size):
    """How long calls take that PyTorch makes one group of."""
    device = torch.device("cuda", torch.cuda.current_device())
    for number, count in ((16, 8), (16, 16384), (16, 131072), (64, 131072), (16, 1 << 20)):
        parts = [torch.zeros(count, device=device) for _ in range(number)]
        wholes = [torch.zeros(count * size, device=device) for _ in range(number)]
        for name, call in (
            ("all_reduce", lambda part, whole: dist.all_reduce(part)),
            ("all_gather_into_tensor", lambda part, whole: dist.all_gather_into_tensor(whole, part)),
            ("reduce_scatter_tensor", lambda part, whole: dist.reduce_scatter_tensor(part, whole)),
        ):

            def group():
                with dist._coalescing_manager(device=device):
                    for part, whole in zip(parts, wholes):
                        call(part, whole)

            clock(rank, f"{number} of {name} together, of {4 * count} bytes", group, 20)


SUBJECTS = {f.__name__: f for f in (collectives, types, groups, ddp, fsdp, graphs, uncapturable, abort, latency, coalesced)}
ONLY_IF_NAMED = {"latency", "coalesced", "uncapturable"}


def in_use():
    """Which libnccl.so.2 the process's calls reach. Torch may have opened its own as well, after the one preloaded."""

    class Info(ctypes.Structure):
        _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p),
                    ("address", ctypes.c_void_p)]

    info, process = Info(), ctypes.CDLL(None)
    process.dladdr(ctypes.cast(process.ncclAllReduce, ctypes.c_void_p), ctypes.byref(info))
    return info.file.decode()


def main():
    # Each step has its own limit; this is for whatever has none.
    faulthandler.dump_traceback_later(300, exit=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses")
    parser.add_argument("--expect")
    parser.add_argument("--hosts", type=int)
    # Before PyTorch's own timeout, which ends the process.
    parser.add_argument("--limit", type=float, default=45)
    parser.add_argument("subjects", nargs="*", default=[name for name in SUBJECTS if name not in ONLY_IF_NAMED])
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.hosts:
        os.environ["NCCL_HOSTID"] = f"host {rank * options.hosts // size}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    watch = stacks.Watch(os.environ.get("STACKS_OUT"))
    with watch.within(options.limit, f"the first call of rank {rank}"):
        dist.init_process_group("nccl", timeout=timedelta(seconds=60))
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    if options.expect and options.expect not in in_use():
        sys.exit(f"{in_use()} is in use, not {options.expect}")
    losses, wrong = {}, 0
    for name in options.subjects:
        start = time.monotonic()
        try:
            with watch.within(options.limit, f"{name} of rank {rank}"):
                outcome = SUBJECTS[name](rank, size)
                torch.cuda.synchronize()
            if outcome is not None:
                losses[name] = outcome
            verdict = "ok"
        except Exception as error:  # The others go on: each subject is a line.
            verdict, wrong = "WRONG: " + " ".join(str(error).split())[-400:], wrong + 1
            print(f"rank {rank}", traceback.format_exc(), file=sys.stderr, flush=True)
        if rank == 0 or verdict != "ok":
            print(f"torch {name:12} {size} ranks {time.monotonic() - start:6.2f} s  rank {rank}: {verdict}", flush=True)
    if rank == 0 and options.losses:
        with open(options.losses, "w") as file:
            json.dump(losses, file)
    # What failed may have left calls that nobody answers.
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
