"""CuPy's nccl module over whatever libnccl.so.2 is loaded: all GPUs of one process, then one process for each.

    cupy_client.py [RANKS] [--expect VERSION]

--expect is a part of the version that the library in use must say that it is: CuPy may have one of its own, which is loaded
beside the one in its place.
"""

import argparse
import faulthandler
import multiprocessing
import os
import sys
import tempfile


def check_library(expect):
    """That the library which was called said so."""
    with open(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))) as told:
        versions = {line.strip() for line in told if line.startswith("NCCL version")}
    assert len(versions) == 1 and expect in min(versions), f"in use: {versions}, not {expect}"


def one_process(size, expect):
    import cupy
    from cupy.cuda import nccl

    comms = nccl.NcclCommunicator.initAll(size)
    arrays, streams = [], []
    for rank, comm in enumerate(comms):
        with cupy.cuda.Device(rank):
            assert comm.rank_id() == rank and comm.size() == size and comm.device_id() == rank
            arrays.append(cupy.full(10_000, rank + 1, dtype=cupy.float32))
            streams.append(cupy.cuda.Stream(non_blocking=True))
            cupy.cuda.Device(rank).synchronize()
    nccl.groupStart()
    for rank, comm in enumerate(comms):
        with cupy.cuda.Device(rank):
            at = arrays[rank].data.ptr
            comm.allReduce(at, at, 10_000, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, streams[rank].ptr)
    nccl.groupEnd()
    for rank in range(size):
        with cupy.cuda.Device(rank):
            streams[rank].synchronize()
            assert (arrays[rank] == size * (size + 1) / 2).all()
    if expect:
        check_library(expect)


def rank_main(rank, size, expect, channel):
    import cupy
    from cupy.cuda import nccl

    faulthandler.dump_traceback_later(40, exit=True)
    cupy.cuda.Device(rank).use()
    if rank == 0:
        unique = nccl.get_unique_id()
        for _ in range(size - 1):
            channel.put(unique)
    else:
        unique = channel.get(timeout=60)
    comm = nccl.NcclCommunicator(size, unique, rank)
    stream = cupy.cuda.Stream.null
    x, y = cupy.full(1000, rank, dtype=cupy.float64), cupy.zeros(1000 * size, dtype=cupy.float64)
    comm.allGather(x.data.ptr, y.data.ptr, 1000, nccl.NCCL_FLOAT64, stream.ptr)
    assert (y.reshape(size, 1000) == cupy.arange(size)[:, None]).all()
    comm.reduceScatter(y.data.ptr, x.data.ptr, 1000, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, stream.ptr)
    assert (x == rank * size).all()
    comm.broadcast(x.data.ptr, x.data.ptr, 1000, nccl.NCCL_FLOAT64, size - 1, stream.ptr)
    assert (x == (size - 1) * size).all()
    nccl.groupStart()
    comm.send(x.data.ptr, 1000, nccl.NCCL_FLOAT64, (rank + 1) % size, stream.ptr)
    comm.recv(y.data.ptr, 1000, nccl.NCCL_FLOAT64, (rank - 1) % size, stream.ptr)
    nccl.groupEnd()
    assert (y[:1000] == (size - 1) * size).all()
    assert comm.check_async_error() is None
    comm.destroy()
    if expect:
        check_library(expect)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int, nargs="?", default=2)
    parser.add_argument("--expect")
    options = parser.parse_args()
    size, expect = options.ranks, options.expect
    # The library that is in use says which it is.
    told = tempfile.TemporaryDirectory()
    os.environ.update(NCCL_DEBUG="WARN", NCCL_DEBUG_FILE=f"{told.name}/%p")
    context = multiprocessing.get_context("spawn")
    first = context.Process(target=one_process, args=(size, expect))
    channel = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, size, expect, channel)) for rank in range(size)]
    for name, processes in (("one process", [first]), ("processes", ranks)):
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
        print(f"cupy {name}: {'ok' if not any(codes) else codes}", flush=True)
        if any(codes):
            sys.exit(1)


if __name__ == "__main__":
    main()
