"""The library from Python's ctypes, without a binding: four processes meet in a file store and sum.

    python.py path/to/libunisono.so.0
"""

import ctypes
import os
import sys
import tempfile

FLOAT64, SUM = 8, 0


class ContextOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("rank_count", ctypes.c_uint32),
        ("store", ctypes.c_void_p),
        ("id", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("timeout_ms", ctypes.c_uint64),
        ("interface", ctypes.c_char_p),
        ("transports", ctypes.c_char_p),
    ]


def load(path):
    lib = ctypes.CDLL(path)
    lib.unisono_last_error.restype = ctypes.c_char_p
    lib.unisono_version_string.restype = ctypes.c_char_p
    lib.unisono_allreduce.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64,
        ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p,
    ]
    lib.unisono_context_destroy.argtypes = [ctypes.c_void_p]
    lib.unisono_store_destroy.argtypes = [ctypes.c_void_p]
    return lib


def rank_main(lib, directory, rank, size):
    def check(status):
        if status != 0:
            raise RuntimeError(f"{status}: {lib.unisono_last_error().decode()}")

    store, ctx = ctypes.c_void_p(), ctypes.c_void_p()
    check(lib.unisono_store_create_file(directory.encode(), ctypes.byref(store)))
    options = ContextOptions(rank=rank, rank_count=size, store=store, name=b"python", timeout_ms=60000)
    options.size = ctypes.sizeof(options)
    check(lib.unisono_context_create(ctypes.byref(options), ctypes.byref(ctx)))
    x = (ctypes.c_double * 1000)(*[rank + i for i in range(1000)])
    check(lib.unisono_allreduce(ctx, x, x, 1000, FLOAT64, SUM, None, None))
    assert list(x) == [size * (size - 1) / 2 + size * i for i in range(1000)]
    assert lib.unisono_allreduce(ctx, None, x, 3, FLOAT64, SUM, None, None) == 1
    assert lib.unisono_last_error() == b"sendbuf is NULL, but count is 3"
    lib.unisono_context_destroy(ctx)
    lib.unisono_store_destroy(store)


def main():
    lib = load(sys.argv[1])
    assert lib.unisono_version_string() == b"0.1.0"
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(4):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    rank_main(lib, os.path.join(directory, "store"), rank, 4)
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * 4, codes


if __name__ == "__main__":
    main()
