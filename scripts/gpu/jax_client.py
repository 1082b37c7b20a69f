"""JAX over whatever libnccl.so.2 is loaded: all GPUs of one process, then one process for each.

    jax_client.py [RANKS] [--expect VERSION]

Each half checks every collective of jax.lax under jit, which XLA also captures into graphs, and trains a small network with
its batch split over the GPUs, whose losses must be those of one GPU. --expect is a part of the version that the library in
use must say that it is: JAX brings one along, which is loaded beside the one in its place.
"""

import argparse
import faulthandler
import os
import socket
import subprocess
import sys
import tempfile

COUNTS = (1, 1000, 1 << 20)
STEPS = 20


def collectives(mesh):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax, shard_map
    from jax.sharding import PartitionSpec as P

    size = mesh.devices.size
    split = P("ranks")

    def over(body, out=split):
        return jax.jit(shard_map(body, mesh=mesh, in_specs=split, out_specs=out, check_vma=False))

    def check(name, got, wanted):
        # What this process has of it.
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index], err_msg=name)

    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
        for count in COUNTS:
            # Row r is rank r's: small whole numbers, exact in every type.
            values = ((np.arange(size * size * count) % 13).reshape(size, size * count) + np.arange(size)[:, None]) % 16
            spread = jax.make_array_from_callback(
                values.shape, jax.sharding.NamedSharding(mesh, split), lambda at: jnp.asarray(values[at], dtype))
            wide = values.astype(np.float64)
            total, top, low = wide.sum(0), wide.max(0), wide.min(0)
            name = f"of {size * count} {jnp.dtype(dtype).name}"
            for _ in range(3):
                check(f"psum {name}", over(lambda x: lax.psum(x, "ranks"))(spread), np.tile(total, (size, 1)))
            check(f"pmax {name}", over(lambda x: lax.pmax(x, "ranks"))(spread), np.tile(top, (size, 1)))
            check(f"pmin {name}", over(lambda x: lax.pmin(x, "ranks"))(spread), np.tile(low, (size, 1)))
            check(f"all_gather {name}", over(lambda x: lax.all_gather(x, "ranks", axis=0, tiled=True))(spread),
                  np.tile(wide, (size, 1)))
            check(f"psum_scatter {name}",
                  over(lambda x: lax.psum_scatter(x[0], "ranks", scatter_dimension=0, tiled=True)[None])(spread),
                  total.reshape(size, count))
            check(f"all_to_all {name}",
                  over(lambda x: lax.all_to_all(x.reshape(size, count), "ranks", 0, 0, tiled=True).reshape(1, -1))(spread),
                  wide.reshape(size, size, count).swapaxes(0, 1).reshape(size, -1))
            around = [(rank, (rank + 1) % size) for rank in range(size)]
            check(f"ppermute {name}", over(lambda x: lax.ppermute(x, "ranks", around))(spread), np.roll(wide, 1, axis=0))


def losses(mesh):
    """Training with the batch split over `mesh`: the compiler puts the collectives in."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P

    random = np.random.default_rng(7)
    images = random.normal(size=(512, 64)).astype(np.float32)
    targets = np.tanh(images @ random.normal(size=(64, 8)).astype(np.float32) / 4)
    start = [random.normal(size=shape).astype(np.float32) / 8 for shape in ((64, 256), (256, 8))]

    def place(array, spec):
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda at: array[at])

    def loss(weights, x, y):
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - y) ** 2)

    @jax.jit
    def step(weights, x, y):
        value, slopes = jax.value_and_grad(loss)(weights, x, y)
        return [w - 0.1 * s for w, s in zip(weights, slopes)], value

    weights = [place(w, P()) for w in start]
    x, y = place(images, P("ranks")), place(targets, P("ranks"))
    curve = []
    with jax.default_matmul_precision("highest"):
        for _ in range(STEPS):
            weights, value = step(weights, x, y)
            curve.append(float(value.addressable_data(0)))
    return curve


def check_all(how, expect):
    import jax
    from jax.sharding import Mesh

    mesh = Mesh(jax.devices(), ("ranks",))
    first = jax.process_index() == 0
    collectives(mesh)
    if first:
        print(f"jax {how}: collectives of {mesh.devices.size}: ok", flush=True)
    curve = losses(mesh)
    alone = losses(Mesh(jax.local_devices()[:1], ("ranks",)))
    worst = max(abs(a - b) / abs(b) for a, b in zip(curve, alone))
    assert curve[-1] < curve[0] and worst < 1e-4, (curve, alone)
    if first:
        print(f"jax {how}: training: ok, {curve[0]:.4f} to {curve[-1]:.4f}, {worst:.1e} from one GPU's", flush=True)
    with open(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))) as told:
        versions = {line.strip() for line in told if line.startswith("NCCL version")}
    assert len(versions) == 1 and expect in versions.pop(), f"in use: {versions}, not {expect}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int, nargs="?")
    parser.add_argument("--expect", default="")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--meet", help="where the processes of a job meet")
    options = parser.parse_args()
    # Memory is taken as it is needed: both halves run beside each other's left-overs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    faulthandler.dump_traceback_later(100, exit=True)
    # The library that is in use says which it is.
    told = tempfile.TemporaryDirectory()
    os.environ.update(NCCL_DEBUG="WARN", NCCL_DEBUG_FILE=f"{told.name}/%p")
    import jax

    if options.rank is not None:
        jax.distributed.initialize(options.meet, options.ranks, options.rank, local_device_ids=[options.rank])
        check_all("a process for each GPU", options.expect)
        jax.distributed.shutdown()
        return
    check_all("one process", options.expect)
    ranks = options.ranks or len(jax.devices())
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    children = [
        subprocess.Popen([sys.executable, __file__, str(ranks), "--rank", str(rank), "--meet", meet, "--expect", options.expect])
        for rank in range(ranks)
    ]
    statuses = [child.wait() for child in children]
    assert not any(statuses), statuses


if __name__ == "__main__":
    main()
