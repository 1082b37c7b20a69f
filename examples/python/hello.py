#!/usr/bin/env python3
"""unisono from Python without any binding:  unisono-run -n 4 -- python3 hello.py

The library is found by the system's loader, or by the path in UNISONO_LIBRARY.
"""

import array
import ctypes
import os
import sys

OK, FLOAT32, SUM = 0, 7, 0  # unisono.h; these numbers never change

lib = ctypes.CDLL(os.environ.get("UNISONO_LIBRARY", "libunisono.so.0"))
lib.unisono_last_error.restype = ctypes.c_char_p
lib.unisono_context_create_from_env.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
for name in "rank", "size", "destroy":
    getattr(lib, f"unisono_context_{name}").argtypes = [ctypes.c_void_p]
lib.unisono_allreduce.argtypes = [
    ctypes.c_void_p,  # context
    ctypes.c_void_p,  # send
    ctypes.c_void_p,  # receive
    ctypes.c_uint64,  # elements
    ctypes.c_int32,  # type
    ctypes.c_int32,  # operator
    ctypes.c_void_p,  # options
    ctypes.c_void_p,  # work
]


def check(status):
    if status != OK:
        sys.exit(lib.unisono_last_error().decode())


context = ctypes.c_void_p()
check(lib.unisono_context_create_from_env(None, ctypes.byref(context)))
rank, size = lib.unisono_context_rank(context), lib.unisono_context_size(context)

x = array.array("f", [rank, rank + 1, rank + 2, rank + 3])
address, count = x.buffer_info()
check(lib.unisono_allreduce(context, address, address, count, FLOAT32, SUM, None, None))
print(f"rank {rank} of {size}: sums are {x.tolist()}")

lib.unisono_context_destroy(context)
