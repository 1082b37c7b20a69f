"""What programs rely on beside the results of collectives, on the GPUs of this machine: one line for each contract.

    nccl_contracts.py path/to/libnccl.so.2 [contract ...]

Most run in one process whose one thread has a rank on every GPU. "mixed" has two such processes, "killed", "stopped" and "grown"
a process for each rank.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "c_tests"))
from nccl_python import BUFFER, COMM, FLOAT32, FUNCTIONS, INT, MAX, SIZE, SUM, Nccl, UniqueId  # noqa: E402

INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS, TIMEOUT = 5, 6, 7, 8
NO_COLOR, DEVICE_SCALAR, SUSPEND_MEM = -1, 0, 1
# What ncclCommMemStats is asked for.
GIVEN_BACK, SUSPENDED, KEPT, TOTAL = range(4)
MORE_FUNCTIONS = {
    "ncclCommInitAll": [ctypes.POINTER(COMM), INT, ctypes.POINTER(INT)],
    "ncclCommFinalize": [COMM],
    "ncclRedOpCreatePreMulSum": [ctypes.POINTER(INT), BUFFER, INT, INT, COMM],
    "ncclRedOpDestroy": [INT, COMM],
    "ncclAlltoAll": [BUFFER, BUFFER, SIZE, INT, COMM, ctypes.c_void_p],
    "ncclCommMemStats": [COMM, INT, ctypes.POINTER(ctypes.c_uint64)],
    "ncclPutSignal": [BUFFER, SIZE, INT, INT, ctypes.c_void_p, SIZE, INT, INT, ctypes.c_uint, COMM, ctypes.c_void_p],
    "ncclSignal": [INT, INT, INT, ctypes.c_uint, COMM, ctypes.c_void_p],
    "ncclWaitSignal": [INT, ctypes.c_void_p, COMM, ctypes.c_void_p],
}


GROWTH = {
    "ncclCommGetUniqueId": [COMM, ctypes.POINTER(UniqueId)],
    "ncclCommGrow": [COMM, INT, ctypes.POINTER(UniqueId), INT, ctypes.POINTER(COMM), ctypes.c_void_p],
}


class WaitSignalDesc(ctypes.Structure):
    """ncclWaitSignalDesc_t."""

    _fields_ = [("count", INT), ("peer", INT), ("index", INT), ("context", INT)]


class Config(ctypes.Structure):
    """ncclConfig_t of 2.28: `blocking` is what is set here."""

    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", INT),
                ("numbers", INT * 3), ("net_name", ctypes.c_char_p), ("more", INT * 2), ("name", ctypes.c_char_p),
                ("rest", INT * 6)]

    def __init__(self, blocking):
        unset = -(2**31)
        super().__init__(ctypes.sizeof(Config), 0xCAFEBEEF, 22809, blocking, (INT * 3)(*[unset] * 3), None,
                         (INT * 2)(*[unset] * 2), None, (INT * 6)(*[unset] * 6))


class Rank:
    def __init__(self, comm, device):
        self.comm, self.device = comm, device
        self.stream = torch.cuda.Stream(device)

    def full(self, count, value):
        with torch.cuda.device(self.device):
            tensor = torch.full((count,), float(value), device=f"cuda:{self.device}")
            torch.cuda.synchronize()
            return tensor

    def all_reduce(self, nccl, x, y=None, op=SUM, stream=None):
        stream = (stream or self.stream).cuda_stream
        nccl.AllReduce(x.data_ptr(), (x if y is None else y).data_ptr(), x.numel(), FLOAT32, op, self.comm, stream)


class World:
    """A communicator of every GPU, driven by this thread."""

    def __init__(self, nccl):
        self.nccl, self.size = nccl, torch.cuda.device_count()
        comms = (COMM * self.size)()
        nccl.CommInitAll(comms, self.size, None)
        self.ranks = [Rank(COMM(comm), device) for device, comm in enumerate(comms)]

    def group(self, call):
        self.nccl.GroupStart()
        for index, rank in enumerate(self.ranks):
            call(index, rank)
        self.nccl.GroupEnd()

    def synchronize(self):
        for rank in self.ranks:
            rank.stream.synchronize()

    def sums(self, count=5000):
        """A sum over all ranks, checked."""
        x = [rank.full(count, index + 1) for index, rank in enumerate(self.ranks)]
        self.group(lambda index, rank: rank.all_reduce(self.nccl, x[index]))
        self.synchronize()
        total = self.size * (self.size + 1) / 2
        assert all((tensor == total).all() for tensor in x), x

    def destroy(self):
        for rank in self.ranks:
            self.nccl.CommDestroy(rank.comm)


def state(nccl, comm):
    result = INT(-1)
    nccl.CommGetAsyncError(comm, ctypes.byref(result))
    return result.value


def settled(nccl, comm, seconds=30):
    end = time.monotonic() + seconds
    while (result := state(nccl, comm)) == IN_PROGRESS:
        assert time.monotonic() < end, "still in progress"
        time.sleep(0.001)
    return result


def device(nccl):
    """Whatever is called, the current device is the caller's afterwards."""
    for current in range(torch.cuda.device_count()):
        torch.cuda.set_device(current)
        world = World(nccl)
        assert torch.cuda.current_device() == current
        world.sums()
        assert torch.cuda.current_device() == current
        world.destroy()
        assert torch.cuda.current_device() == current
    torch.cuda.set_device(0)


def outermost(nccl):
    """Nothing reaches a stream before the outermost end of a group."""
    world = World(nccl)
    x = [rank.full(1000, 1) for rank in world.ranks]
    y = [rank.full(1000, -1) for rank in world.ranks]
    nccl.GroupStart()
    world.group(lambda index, rank: rank.all_reduce(nccl, x[index], y[index]))
    world.synchronize()
    assert all((tensor == -1).all() for tensor in y)
    nccl.GroupEnd()
    world.synchronize()
    assert all((tensor == world.size).all() for tensor in y)
    world.destroy()


def streams(nccl):
    """One communicator on two streams runs its calls in the order in which they are made."""
    world = World(nccl)
    others = [torch.cuda.Stream(rank.device) for rank in world.ranks]
    x = [rank.full(100_000, 1) for rank in world.ranks]
    for rank, tensor in zip(world.ranks, x):
        with torch.cuda.stream(rank.stream):
            torch.cuda._sleep(100_000_000)
            tensor.mul_(2)
    world.group(lambda index, rank: rank.all_reduce(nccl, x[index]))
    world.group(lambda index, rank: rank.all_reduce(nccl, x[index], stream=others[index]))
    for stream in others:
        stream.synchronize()
    assert all((tensor == 2 * world.size**2).all() for tensor in x), x
    world.destroy()


def joined(nccl):
    """A group on several streams of one communicator is one operation, as if it were on each of them."""
    world = World(nccl)
    others = [torch.cuda.Stream(rank.device) for rank in world.ranks]
    # Lengths that no kernel does together.
    x = [rank.full(1000, 1) for rank in world.ranks]
    y = [rank.full(3_000_000, 1) for rank in world.ranks]
    z = [torch.zeros_like(tensor) for tensor in y]
    torch.cuda.synchronize()

    def call(index, rank):
        rank.all_reduce(nccl, x[index])
        # Its input is still being written on the other stream.
        rank.all_reduce(nccl, y[index], z[index], stream=others[index])

    for _ in range(3):
        for rank, small, large in zip(world.ranks, x, y):
            small.fill_(1)
            large.fill_(1)
            torch.cuda.synchronize(rank.device)
            with torch.cuda.stream(rank.stream):
                torch.cuda._sleep(50_000_000)
                small.fill_(2)
                large.fill_(3)
        world.group(call)
        seen = []
        for rank, other, small, large in zip(world.ranks, others, x, z):
            with torch.cuda.stream(other):
                seen.append((small.clone(), 2 * world.size))
            with torch.cuda.stream(rank.stream):
                seen.append((large.clone(), 3 * world.size))
        for rank in world.ranks:
            torch.cuda.synchronize(rank.device)
        assert all((tensor == value).all() for tensor, value in seen)
    world.destroy()


def circle(nccl):
    """Ranks that call two communicators in one group on one stream, in different orders, do not wait for each other in a circle."""
    worlds = [World(nccl), World(nccl)]
    x = [[rank.full(1000, number + 1) for rank in world.ranks] for number, world in enumerate(worlds)]
    nccl.GroupStart()
    for index, first in enumerate(worlds[0].ranks):
        for number in (0, 1) if index % 2 == 0 else (1, 0):
            worlds[number].ranks[index].all_reduce(nccl, x[number][index], stream=first.stream)
    nccl.GroupEnd()
    worlds[0].synchronize()
    for number, world in enumerate(worlds):
        assert all((tensor == (number + 1) * world.size).all() for tensor in x[number]), x
        world.destroy()


def replays(nccl):
    """Graphs are replayed while calls run on other streams; the communicator waits for them."""
    world = World(nccl)
    others = [torch.cuda.Stream(rank.device) for rank in world.ranks]
    x, y = ([rank.full(count, 0) for rank in world.ranks] for count in (1000, 1_000_000))
    graphs = []
    for rank, tensor in zip(world.ranks, x):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(rank.device), torch.cuda.graph(graph, stream=rank.stream):
            for _ in range(3):
                tensor.fill_(1)
                rank.all_reduce(nccl, tensor)
        graphs.append(graph)

    def replay():
        for rank, graph in zip(world.ranks, graphs):
            with torch.cuda.stream(rank.stream):
                graph.replay()

    for number in range(30):
        if number % 3 > 0:
            replay()
        for rank, other, tensor in zip(world.ranks, others, y):
            with torch.cuda.stream(other):
                tensor.fill_(2)
                rank.all_reduce(nccl, tensor, stream=other)
        if number % 3 < 2:
            replay()
    for rank in world.ranks:
        torch.cuda.synchronize(rank.device)
    assert all((tensor == world.size).all() for tensor in x), x
    assert all((tensor == 2 * world.size).all() for tensor in y), y
    replay()
    graphs.clear()
    world.destroy()


def allocating(nccl):
    """A graph may allocate and free memory between calls: from such a graph CUDA takes no edges away."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart" in line))

    def cuda(name, *arguments):
        status = getattr(runtime, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    world = World(nccl)
    x = [rank.full(1000, 1) for rank in world.ranks]
    graphs = []
    for rank, tensor in zip(world.ranks, x):
        graph, between, bytes_ = torch.cuda.CUDAGraph(), ctypes.c_void_p(), ctypes.c_size_t(4 * tensor.numel())
        with torch.cuda.device(rank.device), torch.cuda.graph(graph, stream=rank.stream):
            stream = ctypes.c_void_p(rank.stream.cuda_stream)
            tensor.fill_(1)
            rank.all_reduce(nccl, tensor)
            cuda("cudaMallocAsync", ctypes.byref(between), bytes_, stream)
            nccl.AllReduce(tensor.data_ptr(), between, tensor.numel(), FLOAT32, SUM, rank.comm, stream)
            nccl.AllReduce(between, tensor.data_ptr(), tensor.numel(), FLOAT32, SUM, rank.comm, stream)
            cuda("cudaFreeAsync", between, stream)
            rank.all_reduce(nccl, tensor)
        graphs.append(graph)
    for _ in range(5):
        for rank, graph in zip(world.ranks, graphs):
            with torch.cuda.stream(rank.stream):
                graph.replay()
        world.synchronize()
        assert all((tensor == world.size**4).all() for tensor in x), x
    graphs.clear()
    world.destroy()


def operators(nccl):
    """A factor in device memory; its operator destroyed before the group that uses it ends."""
    world = World(nccl)
    x = [rank.full(3000, 1) for rank in world.ranks]
    factors = [rank.full(1, index + 1) for index, rank in enumerate(world.ranks)]
    nccl.GroupStart()
    for rank, tensor, factor in zip(world.ranks, x, factors):
        op = INT()
        nccl.RedOpCreatePreMulSum(ctypes.byref(op), factor.data_ptr(), FLOAT32, DEVICE_SCALAR, rank.comm)
        rank.all_reduce(nccl, tensor, op=op.value)
        nccl.RedOpDestroy(op.value, rank.comm)
    nccl.GroupEnd()
    world.synchronize()
    assert all((tensor == world.size * (world.size + 1) / 2).all() for tensor in x), x
    world.destroy()


def nonblocking(nccl):
    """Creation, a group's end and finalizing answer that they are in progress; polling completes them."""
    size, unique = torch.cuda.device_count(), UniqueId()
    nccl.GetUniqueId(ctypes.byref(unique))
    comms, config = (COMM * size)(), Config(0)
    nccl.GroupStart()
    for index in range(size):
        torch.cuda.set_device(index)
        at = ctypes.cast(ctypes.byref(comms, index * ctypes.sizeof(COMM)), ctypes.POINTER(COMM))
        nccl.CommInitRankConfig(at, size, unique, index, ctypes.byref(config))
    nccl.GroupEnd()
    torch.cuda.set_device(0)
    ranks = [Rank(COMM(comm), index) for index, comm in enumerate(comms)]
    assert all(settled(nccl, rank.comm) == 0 for rank in ranks)
    x = [rank.full(1000, 1) for rank in ranks]
    nccl.GroupStart()
    for rank, tensor in zip(ranks, x):
        rank.all_reduce(nccl, tensor)
    nccl.GroupEnd()
    for rank in ranks:
        assert settled(nccl, rank.comm) == 0
        nccl.CommFinalize(rank.comm)
    for rank, tensor in zip(ranks, x):
        assert settled(nccl, rank.comm) == 0
        rank.stream.synchronize()
        assert (tensor == size).all()
        nccl.CommDestroy(rank.comm)


def children(nccl):
    """Splits in a group, several of each communicator; who has no colour has no child."""
    world = World(nccl)
    # Colour and key of a rank, child by child.
    wishes = [lambda rank: (NO_COLOR if rank == 0 else 0, -rank), lambda rank: (0, rank), lambda rank: (0, -rank),
              lambda rank: (rank % 2, rank)]
    children = [(COMM * world.size)() for _ in wishes]

    def split(index, rank):
        for comms, wish in zip(children, wishes):
            at = ctypes.cast(ctypes.byref(comms, index * ctypes.sizeof(COMM)), ctypes.POINTER(COMM))
            nccl.CommSplit(rank.comm, *wish(index), at, None)

    world.group(split)
    for comms, wish in zip(children, wishes):
        colors = [wish(rank)[0] for rank in range(world.size)]
        members = [rank for rank in range(world.size) if colors[rank] != NO_COLOR]
        assert all((comms[rank] is None) == (rank not in members) for rank in range(world.size))
        x = [rank.full(2000, index) for index, rank in enumerate(world.ranks)]
        nccl.GroupStart()
        for rank in members:
            Rank(COMM(comms[rank]), rank).all_reduce(nccl, x[rank], op=MAX, stream=world.ranks[rank].stream)
        nccl.GroupEnd()
        world.synchronize()
        for rank in members:
            alike = [other for other in members if colors[other] == colors[rank]]
            alike.sort(key=lambda other: wish(other)[1])
            place = INT(-1)
            nccl.CommUserRank(COMM(comms[rank]), ctypes.byref(place))
            assert place.value == alike.index(rank), (place.value, alike)
            assert (x[rank] == max(alike)).all()
            nccl.CommDestroy(COMM(comms[rank]))
    world.destroy()


def in_place(nccl):
    """Each collective in place, misaligned, of nothing; a receive buffer that only the root has."""
    world = World(nccl)
    size, count = world.size, 1001
    for offset in (0, 1, 3):
        x = [rank.full(count * size + 8, index + 1) for index, rank in enumerate(world.ranks)]
        at = [tensor.data_ptr() + 4 * offset for tensor in x]

        def gather(index, rank):
            own = at[index] + 4 * index * count
            nccl.AllGather(own, at[index], count, FLOAT32, rank.comm, rank.stream.cuda_stream)

        def scatter(index, rank):
            own = at[index] + 4 * index * count
            nccl.ReduceScatter(at[index], own, count, FLOAT32, SUM, rank.comm, rank.stream.cuda_stream)

        def reduce(index, rank):
            to = at[index] if index == 0 else None
            nccl.Reduce(at[index], to, count, FLOAT32, SUM, 0, rank.comm, rank.stream.cuda_stream)

        def nothing(index, rank):
            nccl.AllReduce(None, None, 0, FLOAT32, SUM, rank.comm, rank.stream.cuda_stream)

        world.group(gather)
        world.synchronize()
        blocks = torch.arange(1, size + 1).repeat_interleave(count).float()
        assert all((tensor[offset:offset + count * size].cpu() == blocks).all() for tensor in x)
        world.group(scatter)
        world.synchronize()
        for index, tensor in enumerate(x):
            assert (tensor[offset + index * count:][:count] == (index + 1) * size).all()
        world.group(reduce)
        world.group(nothing)
        world.synchronize()
        assert (x[0][offset:][:count] == size + size - 1).all(), x[0][offset:][:count]
        assert (x[0][:offset] == 1).all() and (x[0][offset + count * size:] == 1).all()
    world.destroy()


def one_sided(nccl):
    """All-to-alls by puts, behind barriers of signals; in graphs, too. A wait for what never comes ends with the abort."""
    world = World(nccl)
    size, part = world.size, 50_000
    x, y = [rank.full(part * size, 0) for rank in world.ranks], [rank.full(part * size, -1) for rank in world.ranks]
    windows = [ctypes.c_void_p() for _ in world.ranks]
    world.group(lambda index, rank: nccl.CommWindowRegister(rank.comm, y[index].data_ptr(), 4 * part * size,
                                                            ctypes.byref(windows[index]), 1))
    assert all(windows), windows
    from_all = (WaitSignalDesc * size)(*[WaitSignalDesc(1, peer, 0, 0) for peer in range(size)])

    def exchange(index, rank):
        stream = rank.stream.cuda_stream
        for peer in range(size):
            nccl.Signal(peer, 0, 0, 0, rank.comm, stream)
        nccl.WaitSignal(size, from_all, rank.comm, stream)
        nccl.GroupStart()
        nccl.WaitSignal(size, from_all, rank.comm, stream)
        for peer in range(size):
            at = x[index].data_ptr() + 4 * part * peer
            nccl.PutSignal(at, part, FLOAT32, peer, windows[index], 4 * part * index, 0, 0, 0, rank.comm, stream)
        nccl.GroupEnd()

    def checked(start, step):
        for index, rank in enumerate(world.ranks):
            with torch.cuda.stream(rank.stream):
                x[index].copy_(torch.arange(size, device=rank.device).repeat_interleave(part) + 100 * index + start)
                # A replay goes to the current stream.
                step(index, rank)
        world.synchronize()
        for index, tensor in enumerate(y):
            wanted = 100.0 * torch.arange(size, device=tensor.device) + index + start
            found = tensor.view(size, part)
            wrong = {row: found[row].unique()[:4].tolist() for row in range(size) if (found[row] != wanted[row]).any()}
            states = [state(nccl, rank.comm) for rank in world.ranks]
            assert not wrong, f"rank {index}, step {start}: wanted {wanted.tolist()}, found in rows {wrong}, states {states}"

    for number in range(5):
        checked(number, exchange)
    graphs = [torch.cuda.CUDAGraph() for _ in world.ranks]
    for index, (rank, graph) in enumerate(zip(world.ranks, graphs)):
        with torch.cuda.device(rank.device), torch.cuda.graph(graph, stream=rank.stream):
            exchange(index, rank)
    for number in range(5, 10):
        checked(number, lambda index, rank: graphs[index].replay())
    checked(10, exchange)
    graphs.clear()
    # Graphs of one rank that signal the same one in streams that nothing orders: all of it counts.
    first, second, times = world.ranks[0], world.ranks[1], 500
    streams = [torch.cuda.Stream(first.device) for _ in range(2)]
    graphs = [torch.cuda.CUDAGraph() for _ in streams]
    for stream, graph in zip(streams, graphs):
        with torch.cuda.device(first.device), torch.cuda.graph(graph, stream=stream):
            nccl.Signal(1, 0, 0, 0, first.comm, stream.cuda_stream)
    for _ in range(times):
        for stream, graph in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
    all_of_it = WaitSignalDesc(2 * times, 0, 0, 0)
    nccl.WaitSignal(1, ctypes.byref(all_of_it), second.comm, second.stream.cuda_stream)
    world.synchronize()
    graphs.clear()
    world.sums()
    rank = world.ranks[0]
    nccl.WaitSignal(1, ctypes.byref(WaitSignalDesc(1, 1, 0, 0)), rank.comm, rank.stream.cuda_stream)
    time.sleep(0.1)
    assert not rank.stream.query()
    start = time.monotonic()
    nccl.CommAbort(rank.comm)
    rank.stream.synchronize()
    gone = time.monotonic() - start
    assert gone < 1, gone
    for other in world.ranks[1:]:
        nccl.CommAbort(other.comm)


def held(nccl, rank):
    """What the communicator says of its memory."""
    values = []
    for stat in (GIVEN_BACK, SUSPENDED, KEPT, TOTAL):
        value = ctypes.c_uint64()
        nccl.CommMemStats(rank.comm, stat, ctypes.byref(value))
        values.append(value.value)
    return values


def suspended(nccl):
    """A suspended communicator gives its GPU memory back and takes no calls; resumed, it does. What graphs refer to stays."""
    world = World(nccl)
    world.sums()
    free = lambda: [torch.cuda.mem_get_info(rank.device)[0] for rank in world.ranks]  # noqa: E731
    suspend, resume = (lambda _, rank: nccl.CommSuspend(rank.comm, SUSPEND_MEM)), (lambda _, rank: nccl.CommResume(rank.comm))
    given = 0
    for _ in range(3):
        before, holds = free(), [held(nccl, rank) for rank in world.ranks]
        assert all(back == total > 0 and not is_suspended and not kept for back, is_suspended, kept, total in holds), holds
        world.group(suspend)
        given = min(now - then for now, then in zip(free(), before))
        assert given >= holds[0][TOTAL], (given, holds)
        assert all(held(nccl, rank) == [0, 1, 0, 0] for rank in world.ranks)
        x = world.ranks[0].full(1000, 1)
        try:
            world.ranks[0].all_reduce(nccl, x)
            raise AssertionError("a call of a communicator that is suspended")
        except RuntimeError as error:
            assert "ncclCommResume first" in str(error), error
        world.group(resume)
        assert [held(nccl, rank) for rank in world.ranks] == holds
        world.sums()
        world.sums(5_000_000)
    x, graphs = [rank.full(1000, 0) for rank in world.ranks], []
    for rank, tensor in zip(world.ranks, x):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(rank.device), torch.cuda.graph(graph, stream=rank.stream):
            tensor.fill_(1)
            rank.all_reduce(nccl, tensor)
        graphs.append(graph)
    before = [held(nccl, rank) for rank in world.ranks]
    assert all(back == 0 < kept == total for back, _, kept, total in before), before
    world.group(suspend)
    assert [held(nccl, rank)[TOTAL] for rank in world.ranks] == [total for *_, total in before]
    world.group(resume)
    for rank, graph in zip(world.ranks, graphs):
        with torch.cuda.stream(rank.stream):
            graph.replay()
    world.synchronize()
    assert all((tensor == world.size).all() for tensor in x), x
    world.sums()
    graphs.clear()
    world.destroy()
    return f"{given >> 20} MiB given back"


def abort(nccl):
    """From another thread, while a kernel waits for ranks that do not call; then a new communicator."""
    world = World(nccl)
    world.sums()
    rank, x = world.ranks[0], world.ranks[0].full(1 << 20, 1)
    rank.all_reduce(nccl, x)
    time.sleep(0.2)
    assert not rank.stream.query()
    start = time.monotonic()
    thread = threading.Thread(target=nccl.CommAbort, args=(rank.comm,))
    thread.start()
    thread.join(10)
    aborted = time.monotonic() - start
    rank.stream.synchronize()
    gone = time.monotonic() - start
    assert gone < 1, (aborted, gone)
    for other in world.ranks[1:]:
        nccl.CommAbort(other.comm)
    world = World(nccl)
    world.sums()
    world.destroy()
    return f"ncclCommAbort {1e3 * aborted:.1f} ms, the kernel gone after {1e3 * gone:.1f}"


def mismatch(nccl):
    """Calls that differ: both are named, CUDA is well, a new communicator works."""
    world = World(nccl)
    x = [rank.full(100, 1) for rank in world.ranks]
    nccl.GroupStart()
    for index, rank in enumerate(world.ranks):
        rank.all_reduce(nccl, x[index][:50 if index == 1 else 100])
    try:
        nccl.GroupEnd()
        raise AssertionError("calls that differ succeeded")
    except RuntimeError as error:
        text = str(error)
    assert "rank 1" in text and "allreduce(50" in text and "allreduce(100" in text, text
    for rank in world.ranks:
        nccl.CommAbort(rank.comm)
    world.synchronize()
    world = World(nccl)
    world.sums()
    world.destroy()
    return text.split(": ", 2)[-1][:150]


def lose(rank, path, size, ids, how, results):
    """A process of `killed` and `stopped`: the last rank leaves the others in a call."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    nccl = Nccl(path, FUNCTIONS | MORE_FUNCTIONS)

    def meet(index, members, unique):
        comm = COMM()
        nccl.CommInitRank(ctypes.byref(comm), members, unique, index)
        return Rank(comm, torch.cuda.current_device())

    first, second = (UniqueId.from_buffer_copy(unique) for unique in ids)
    one = meet(rank, size, first)
    x = one.full(1 << 20, 1)
    one.all_reduce(nccl, x)
    one.stream.synchronize()
    if rank == size - 1:
        os.kill(os.getpid(), how)
        time.sleep(60)
    time.sleep(0.3)
    start = time.monotonic()
    try:
        one.all_reduce(nccl, x)
        while (error := state(nccl, one.comm)) == 0:
            assert time.monotonic() - start < 20, "nothing was heard"
            time.sleep(0.001)
        text = nccl.library.ncclGetLastError(one.comm).decode()
    except RuntimeError as raised:
        error, text = None, str(raised)
    heard = time.monotonic() - start
    start = time.monotonic()
    nccl.CommAbort(one.comm)
    one.stream.synchronize()
    ended = time.monotonic() - start
    assert ended < 1, ended
    assert f"rank {size - 1}" in text, text
    assert error in (None, REMOTE_ERROR, TIMEOUT), error
    again = meet(rank, size - 1, second)
    x = again.full(1000, 1)
    again.all_reduce(nccl, x)
    again.stream.synchronize()
    assert (x == size - 1).all(), x
    nccl.CommDestroy(again.comm)
    results.put(f"heard after {heard:.2f} s, ended in {1e3 * ended:.1f} ms: {text[:120]}")


def half(which, path, unique, results):
    """A process of `mixed`: a rank on every GPU."""
    nccl, gpus = Nccl(path, FUNCTIONS | MORE_FUNCTIONS), torch.cuda.device_count()
    comms = (COMM * gpus)()
    unique = UniqueId.from_buffer_copy(unique)
    nccl.GroupStart()
    for index in range(gpus):
        torch.cuda.set_device(index)
        at = ctypes.cast(ctypes.byref(comms, index * ctypes.sizeof(COMM)), ctypes.POINTER(COMM))
        nccl.CommInitRank(at, 2 * gpus, unique, which * gpus + index)
    nccl.GroupEnd()
    ranks = [Rank(COMM(comm), index) for index, comm in enumerate(comms)]
    for count in (100, 100_000, 5_000_000):
        for call in (lambda rank: nccl.CommSuspend(rank.comm, SUSPEND_MEM)), (lambda rank: nccl.CommResume(rank.comm)):
            nccl.GroupStart()
            for rank in ranks:
                call(rank)
            nccl.GroupEnd()
        x = [rank.full(count, which * gpus + index + 1) for index, rank in enumerate(ranks)]
        nccl.GroupStart()
        for rank, tensor in zip(ranks, x):
            rank.all_reduce(nccl, tensor)
        nccl.GroupEnd()
        for rank, tensor in zip(ranks, x):
            rank.stream.synchronize()
            assert (tensor == gpus * (2 * gpus + 1)).all(), (count, tensor)
    for rank in ranks:
        nccl.CommDestroy(rank.comm)
    results.put(f"{2 * gpus} ranks of 2 processes on {gpus} GPUs")


def grow(rank, path, ids, results):
    """A process of `grown`: one that is alone on its GPU, and one that joins it."""
    nccl, unique, comm, larger = Nccl(path, FUNCTIONS | GROWTH), UniqueId(), COMM(), COMM()
    torch.cuda.set_device(rank)
    if rank == 0:
        nccl.GetUniqueId(ctypes.byref(unique))
        nccl.CommInitRank(ctypes.byref(comm), 1, unique, 0)
        nccl.CommGetUniqueId(comm, ctypes.byref(unique))
        ids.put(bytes(unique))
        nccl.CommGrow(comm, 2, None, -1, ctypes.byref(larger), None)
    else:
        unique = UniqueId.from_buffer_copy(ids.get(timeout=60))
        nccl.CommGrow(None, 2, ctypes.byref(unique), 1, ctypes.byref(larger), None)
    one = Rank(larger, rank)
    for count in (1, 1000, 5_000_000):
        x = one.full(count, rank + 1)
        one.all_reduce(nccl, x)
        one.stream.synchronize()
        assert (x == 3).all(), (count, x)
    if rank == 0:
        alone = Rank(comm, rank)
        x = alone.full(1000, 7)
        alone.all_reduce(nccl, x)
        alone.stream.synchronize()
        assert (x == 7).all(), x
        nccl.CommDestroy(comm)
    nccl.CommDestroy(larger)
    results.put("from one rank to two")


def processes(target, count, answers, *arguments):
    """Runs target(number, *arguments, results) in processes of their own; one of the `answers` that they put there."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    started = [context.Process(target=target, args=(number, *arguments, results)) for number in range(count)]
    for process in started:
        process.start()
    try:
        said = [results.get(timeout=60) for _ in range(answers)]
        for process in started[:answers]:
            process.join(10)
        assert not any(process.exitcode for process in started[:answers]), [process.exitcode for process in started]
        return said[0]
    finally:
        for process in started:
            process.kill()
            process.join()


def unique_ids(nccl, count):
    ids = [UniqueId() for _ in range(count)]
    for unique in ids:
        nccl.GetUniqueId(ctypes.byref(unique))
    return [bytes(unique) for unique in ids]


def main():
    path, wanted = sys.argv[1], sys.argv[2:]
    nccl = Nccl(path, FUNCTIONS | MORE_FUNCTIONS)

    def mixed():
        return processes(half, 2, 2, path, *unique_ids(nccl, 1))

    def grown():
        return processes(grow, 2, 2, path, multiprocessing.get_context("spawn").Queue())

    def killed():
        return processes(lose, 3, 2, path, 3, unique_ids(nccl, 2), signal.SIGKILL)

    def stopped():
        # A rank that stands still is noticed by the time that calls may take.
        os.environ["UNISONO_NCCL_TIMEOUT"] = "4"
        return processes(lose, 3, 2, path, 3, unique_ids(nccl, 2), signal.SIGSTOP)

    contracts = {f.__name__: (lambda f=f: f(nccl)) for f in (device, outermost, streams, joined, circle, replays, allocating,
                                                             operators, nonblocking, children, in_place, one_sided, suspended,
                                                             abort, mismatch)}
    contracts |= {f.__name__: f for f in (mixed, grown, killed, stopped)}
    if torch.cuda.device_count() < 2:
        sys.exit("needs two GPUs")
    wrong = 0
    for name in wanted or contracts:
        start = time.monotonic()
        try:
            said = contracts[name]() or ""
            verdict = "ok"
        except Exception as error:  # The others go on: each contract is a line.
            said, verdict, wrong = " ".join(f"{type(error).__name__}: {error}".split())[-300:], "WRONG", wrong + 1
        print(f"contract {name:12} {time.monotonic() - start:5.2f} s  {verdict} {said}".rstrip(), flush=True)
    # What failed may have left calls that nobody answers.
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
