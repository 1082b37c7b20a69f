"""CuPy's nccl module over whatever libnccl.so.2 is loaded: all GPUs of one process, then one process for each.

    cupy_client.py [ranks]
"""

import faulthandler
import multiprocessing
import sys


def one_process(size):
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


def rank_main(rank, size, channel):
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


def main():
    size = int((sys.argv[1:] or ["2"])[0])
    context = multiprocessing.get_context("spawn")
    first = context.Process(target=one_process, args=(size,))
    channel = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, size, channel)) for rank in range(size)]
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
