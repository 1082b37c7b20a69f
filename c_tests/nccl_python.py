"""libnccl.so.2 from Python's ctypes, bound as inference servers bind it: by name, at run time.

    nccl_python.py path/to/libnccl.so.2 [ranks] [cuda]

The ranks are processes. Without "cuda" they work on host memory; with it, on a GPU each, by way of torch's tensors and
streams.
"""

import ctypes
import multiprocessing
import os
import sys


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


INT32, INT64, FLOAT32, SUM, MAX, AVG = 2, 4, 7, 0, 2, 4
COMM, STREAM, BUFFER, SIZE, INT = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

FUNCTIONS = {
    "ncclGetVersion": [ctypes.POINTER(INT)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(COMM), INT, UniqueId, INT],
    "ncclCommInitRankConfig": [ctypes.POINTER(COMM), INT, UniqueId, INT, ctypes.c_void_p],
    "ncclCommSplit": [COMM, INT, INT, ctypes.POINTER(COMM), ctypes.c_void_p],
    "ncclCommCount": [COMM, ctypes.POINTER(INT)],
    "ncclCommUserRank": [COMM, ctypes.POINTER(INT)],
    "ncclCommGetAsyncError": [COMM, ctypes.POINTER(INT)],
    "ncclCommDestroy": [COMM],
    "ncclCommAbort": [COMM],
    "ncclCommSuspend": [COMM, INT],
    "ncclCommResume": [COMM],
    "ncclCommWindowRegister": [COMM, BUFFER, SIZE, ctypes.POINTER(ctypes.c_void_p), INT],
    "ncclCommWindowDeregister": [COMM, ctypes.c_void_p],
    "ncclAllReduce": [BUFFER, BUFFER, SIZE, INT, INT, COMM, STREAM],
    "ncclReduce": [BUFFER, BUFFER, SIZE, INT, INT, INT, COMM, STREAM],
    "ncclBroadcast": [BUFFER, BUFFER, SIZE, INT, INT, COMM, STREAM],
    "ncclAllGather": [BUFFER, BUFFER, SIZE, INT, COMM, STREAM],
    "ncclReduceScatter": [BUFFER, BUFFER, SIZE, INT, INT, COMM, STREAM],
    "ncclSend": [BUFFER, SIZE, INT, INT, COMM, STREAM],
    "ncclRecv": [BUFFER, SIZE, INT, INT, COMM, STREAM],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclMemAlloc": [ctypes.POINTER(ctypes.c_void_p), SIZE],
    "ncclMemFree": [ctypes.c_void_p],
}


class Nccl:
    def __init__(self, path, functions=FUNCTIONS):
        library = ctypes.CDLL(path)
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetLastError.restype = ctypes.c_char_p
        library.ncclGetLastError.argtypes = [COMM]
        for name, arguments in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = INT, arguments
        self.library = library

    def __getattr__(self, name):
        function = getattr(self.library, "nccl" + name)

        def call(*arguments):
            result = function(*arguments)
            if result not in (0, 7):
                text = self.library.ncclGetErrorString(result).decode()
                raise RuntimeError(f"nccl{name}: {text}: {self.library.ncclGetLastError(None).decode()}")

        return call


class HostMemory:
    """Arrays of ctypes."""

    stream = None

    def __init__(self, rank):
        pass

    def floats(self, values):
        return (ctypes.c_float * len(values))(*values)

    def address(self, array):
        return ctypes.addressof(array)

    def values(self, array):
        return list(array)


class DeviceMemory:
    """Tensors of torch, on the device of this rank."""

    def __init__(self, rank):
        import torch

        self.torch = torch
        torch.cuda.set_device(rank)
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.side = torch.cuda.Stream()
        torch.cuda.set_stream(self.side)
        self.stream = self.side.cuda_stream

    def floats(self, values):
        return self.torch.tensor(values, dtype=self.torch.float32, device="cuda")

    def address(self, array):
        return array.data_ptr()

    def values(self, array):
        return array.cpu().tolist()


def rank_main(path, rank, size, channel, cuda):
    memory = DeviceMemory(rank) if cuda else HostMemory(rank)
    nccl = Nccl(path)
    version = INT()
    nccl.GetVersion(ctypes.byref(version))
    assert version.value == 22809, version.value
    unique = UniqueId()
    if rank == 0:
        nccl.GetUniqueId(ctypes.byref(unique))
        for _ in range(size - 1):
            channel.put(bytes(unique))
    else:
        ctypes.memmove(ctypes.byref(unique), channel.get(timeout=60), 128)
    comm = COMM()
    nccl.CommInitRank(ctypes.byref(comm), size, unique, rank)

    stream, address = memory.stream, memory.address
    for count in (1, 1000, 300_000):
        x = memory.floats([float(rank + i % 7) for i in range(count)])
        y = memory.floats([0.0] * count)
        nccl.AllReduce(address(x), address(y), count, FLOAT32, SUM, comm, stream)
        assert memory.values(y)[-1] == size * (size - 1) / 2 + size * ((count - 1) % 7), count
    x, y = memory.floats([1.0 * rank] * 10), memory.floats([0.0] * 10 * size)
    nccl.AllGather(address(x), address(y), 10, FLOAT32, comm, stream)
    assert memory.values(y) == [float(i // 10) for i in range(10 * size)]
    nccl.ReduceScatter(address(y), address(x), 10, FLOAT32, SUM, comm, stream)
    assert memory.values(x) == [float(size * rank)] * 10
    nccl.Broadcast(address(x), address(x), 10, FLOAT32, size - 1, comm, stream)
    assert memory.values(x) == [float(size * (size - 1))] * 10

    x, y = memory.floats([float(rank)] * 5), memory.floats([-1.0] * 5)
    nccl.GroupStart()
    nccl.Send(address(x), 5, FLOAT32, (rank + 1) % size, comm, stream)
    nccl.Recv(address(y), 5, FLOAT32, (rank + size - 1) % size, comm, stream)
    nccl.GroupEnd()
    assert memory.values(y) == [float((rank + size - 1) % size)] * 5

    child = COMM()
    nccl.CommSplit(comm, 0, -rank, ctypes.byref(child), None)
    number = INT()
    nccl.CommUserRank(child, ctypes.byref(number))
    assert number.value == size - 1 - rank
    nccl.AllReduce(address(x), address(x), 5, FLOAT32, MAX, child, stream)
    assert memory.values(x) == [float(size - 1)] * 5
    nccl.CommDestroy(child)

    window, block = ctypes.c_void_p(), ctypes.c_void_p()
    nccl.MemAlloc(ctypes.byref(block), 4096)
    nccl.CommWindowRegister(comm, block, 4096, ctypes.byref(window), 1)
    nccl.CommWindowDeregister(comm, window)
    nccl.MemFree(block)
    # All ranks do.
    nccl.CommSuspend(comm, 1)
    try:
        nccl.AllReduce(address(x), address(x), 5, FLOAT32, MAX, comm, stream)
        raise AssertionError("a call of a communicator that is suspended")
    except RuntimeError as error:
        assert "ncclCommResume first" in str(error), error
    nccl.CommResume(comm)
    nccl.AllReduce(address(x), address(x), 5, FLOAT32, MAX, comm, stream)
    state = INT(-1)
    nccl.CommGetAsyncError(comm, ctypes.byref(state))
    assert state.value == 0
    nccl.CommDestroy(comm)


def main():
    path, size, cuda = sys.argv[1], int((sys.argv[2:] or ["3"])[0]), "cuda" in sys.argv[3:]
    if not cuda:
        os.environ["UNISONO_NCCL_HOST"] = "1"
    context = multiprocessing.get_context("spawn")
    channel = context.Queue()
    ranks = [context.Process(target=rank_main, args=(path, rank, size, channel, cuda)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    late = [rank for rank in ranks if rank.is_alive()]
    for rank in late:
        rank.kill()
    codes = [rank.exitcode for rank in ranks]
    assert not late and codes == [0] * size, codes
    print(f"ctypes: {size} ranks, {'device' if cuda else 'host'} memory: ok")


if __name__ == "__main__":
    main()
