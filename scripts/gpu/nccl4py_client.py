"""NVIDIA's Python bindings, nccl4py, over whatever libnccl.so.2 is loaded: what their newer names do, a process for each rank.

    nccl4py_client.py [ranks] [--expect PART]

Ranks share the GPUs that there are. --expect is a part of the path of the library that must be in use.
"""

import faulthandler
import multiprocessing
import sys
import time
import traceback

COUNT = 100_000


def collectives(comm, rank, size):
    import nccl.core as nccl
    import torch

    ranks = range(size)
    x = torch.full((COUNT,), rank + 1.0, device="cuda")
    y = torch.empty_like(x)
    wide = torch.empty(COUNT * size, device="cuda")
    comm.allreduce(x, y, nccl.SUM)
    assert (y == sum(r + 1 for r in ranks)).all()
    comm.allreduce(x, y, nccl.MAX)
    assert (y == size).all()
    comm.reduce(x, y if rank == 0 else None, nccl.AVG, root=0)
    assert rank or (y == (size + 1) / 2).all()
    comm.broadcast(x, y, root=size - 1)
    assert (y == size).all()
    comm.allgather(x, wide)
    assert (wide.view(size, -1) == torch.arange(1, size + 1, device="cuda")[:, None]).all()
    comm.reduce_scatter(wide, y, nccl.SUM)
    assert (y == size * (rank + 1)).all()
    every = torch.empty_like(wide)
    comm.alltoall(wide, every)
    assert (every == rank + 1).all()
    comm.gather(x, wide if rank == 0 else None, root=0)
    assert rank or (wide.view(size, -1)[:, 0] == torch.arange(1, size + 1, device="cuda")).all()
    comm.scatter(wide if rank == 0 else None, y, root=0)
    assert (y == rank + 1).all()
    with nccl.group():
        comm.send(x, (rank + 1) % size)
        comm.recv(y, (rank - 1) % size)
    assert (y == (rank - 1) % size + 1).all()
    for kind in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64):
        z = torch.full((33,), rank + 1, dtype=kind, device="cuda")
        comm.allreduce(z, z, nccl.SUM)
        assert (z == size * (size + 1) // 2).all(), kind


def operators(comm, rank, size):
    import nccl.core as nccl
    import torch

    x = torch.full((COUNT,), rank + 1.0, device="cuda")
    y = torch.empty_like(x)
    for factor in (0.5, torch.full((1,), 0.5, device="cuda")):
        scaled = comm.create_pre_mul_sum(factor, nccl.FLOAT32)
        comm.allreduce(x, y, scaled)
        assert (y == size * (size + 1) / 4).all()
        scaled.close()


def configured(comm, rank, size):
    import nccl.core as nccl
    import torch
    from cuda.core import Device

    x = torch.full((COUNT,), 1.0, device="cuda")
    comm.allreduce(x, x, nccl.SUM, config=nccl.NCCLCollConfig(max_ctas=2, cta_policy=nccl.CTAPolicy.EFFICIENCY))
    comm.broadcast(x, x, root=0, config=nccl.NCCLCollConfig(vendor_options=(nccl.VendorOption(7, 1, int_value=3),)))
    assert (x == size).all()
    device = Device(rank % torch.cuda.device_count())
    device.set_current()
    launched = device.create_event()
    comm.allreduce(x, x, nccl.SUM, config=nccl.NCCLCollConfig(launch_completion_event=launched))
    launched.sync()
    assert (x == size * size).all()


def told(comm, rank, size):
    import nccl.core as nccl
    import torch

    properties = comm.properties
    assert (properties.rank, properties.n_ranks) == (rank, size), properties
    assert properties.cuda_dev == comm.device.device_id == torch.cuda.current_device()
    assert comm.get_mem_stat(nccl.NcclCommMemStat.GPU_MEM_TOTAL) > 0
    assert comm.get_async_error() == 0
    try:
        comm.broadcast(torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda"), root=size)
    except Exception as error:
        assert "root" in comm.get_last_error(), (error, comm.get_last_error())
    else:
        raise AssertionError("a root beyond the ranks was taken")


def children(comm, rank, size):
    import nccl.core as nccl
    import torch

    x = torch.ones(COUNT, device="cuda")
    half = comm.split(rank % 2, rank)
    half.allreduce(x, x, nccl.SUM)
    assert (x == half.nranks).all()
    half.destroy()
    lone = comm.split(0 if rank == 0 else None)
    assert lone.is_valid == (rank == 0)
    if rank == 0:
        lone.destroy()
    slow = comm.split(0, rank, nccl.NCCLConfig(blocking=False, max_ctas=4, comm_name="slow", graph_usage_mode=1))
    while comm.get_async_error() == 7 or slow.get_async_error() == 7:
        time.sleep(0.001)
    x.fill_(1)
    slow.allreduce(x, x, nccl.SUM)
    while slow.get_async_error() == 7:
        time.sleep(0.001)
    assert (x == size).all()
    slow.abort()
    if size > 1:
        if rank < size - 1:
            fewer = comm.shrink([size - 1])
            x.fill_(1)
            fewer.allreduce(x, x, nccl.SUM)
            assert (x == size - 1).all() and fewer.nranks == size - 1
            fewer.destroy()


def windows(comm, rank, size):
    import nccl.core as nccl
    import torch

    allocated = nccl.mem_alloc(COUNT * 4)
    x = torch.from_dlpack(allocated)[: COUNT * 4].view(torch.float32)
    x.fill_(rank + 1)
    registered = comm.register_buffer(x)
    window = comm.register_window(x, nccl.WindowFlag.COLL_SYMMETRIC)
    comm.allreduce(x, x, nccl.SUM)
    assert (x == size * (size + 1) / 2).all()
    if window.handle:
        assert window.user_ptr == x.data_ptr()
        x.fill_(rank)
        torch.cuda.synchronize()
        comm.allreduce(torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda"), nccl.SUM)
        half = COUNT // 2
        comm.put_signal(x[:half], (rank + 1) % size, window, half)
        comm.wait_signal(nccl.WaitSignalDesc((rank - 1) % size))
        assert (x[half:] == (rank - 1) % size).all() and (x[:half] == rank).all()
        window.close()
    registered.close()


SUBJECTS = (collectives, operators, configured, told, children, windows)


def rank_main(rank, size, expect, channel):
    import nccl.core as nccl
    import torch

    faulthandler.dump_traceback_later(60, exit=True)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    version = nccl.get_version()
    assert not expect or expect in str(version.libnccl.path), version
    if rank == 0:
        unique = nccl.get_unique_id()
        for _ in range(size - 1):
            channel.put(bytes(unique))
    else:
        unique = nccl.UniqueId.from_bytes(channel.get(timeout=60))
    comm = nccl.Communicator.init(size, rank, unique, nccl.NCCLConfig(comm_name="client", cta_policy=nccl.CTAPolicy.DEFAULT))
    failed = []
    for subject in SUBJECTS:
        try:
            subject(comm, rank, size)
            torch.cuda.synchronize()
            told = "ok"
        except Exception as error:
            failed.append(subject.__name__)
            line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__][-1]
            told = f"FAILED in line {line}, {type(error).__name__}: {error}; {comm.get_last_error()}"
        if rank == 0 or told != "ok":
            print(f"nccl4py {subject.__name__}, rank {rank} of {size}: {told}", flush=True)
    comm.finalize()
    comm.destroy()
    sys.exit(bool(failed))


def main():
    words = sys.argv[1:]
    expect = words.pop(words.index("--expect") + 1) if "--expect" in words else None
    size = int((words or ["2"])[0])
    context = multiprocessing.get_context("spawn")
    channel = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, size, expect, channel)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    codes = [process.exitcode for process in ranks]
    print(f"nccl4py: {'ok' if not any(codes) else codes}", flush=True)
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
