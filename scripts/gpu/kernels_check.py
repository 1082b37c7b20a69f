#!/usr/bin/env python3
"""Runs the committed kernels on a GPU: kernels_check.py [--quick]

Correctness: every kernel of kernels/fold.sm_90.xz, so on an H200, against the same sources compiled for the host, which tests/kernels.rs holds
against src/reduce; over operand counts, alignments, representations, grids and in place. And the GPU's conversion
instructions against the portable code, over every float. Speed: GB/s of memory traffic by type and count of operands.
Needs CuPy, g++, and the driver. Exit status 1 if any bit differs. --quick leaves out the speed.
"""

import argparse
import ctypes
import itertools
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path

import cupy
import numpy

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
MAX_OPERANDS = 32
# Bytes of an element and of an accumulator.
SIZES = {"I8": (1, 1), "U8": (1, 1), "I32": (4, 4), "U32": (4, 4), "I64": (8, 8), "U64": (8, 8), "F32": (4, 4), "F64": (8, 8),
         "F16": (2, 4), "Bf16": (2, 4), "F8E4M3": (1, 4), "F8E5M2": (1, 4)}
FLOATS = ["F16", "F32", "F64", "Bf16", "F8E4M3", "F8E5M2"]
INTEGERS = ["I8", "U8", "I32", "U32", "I64", "U64"]
UNSIGNED = ["U8", "U32", "U64"]
NAMES = ([("Sum", t) for t in FLOATS + UNSIGNED] + [("Product", t) for t in FLOATS + UNSIGNED] +
         [(op, t) for op in ("Min", "Max") for t in FLOATS + INTEGERS] + [("Average", t) for t in INTEGERS] +
         [(op, "U8") for op in ("And", "Or", "Xor")])


class Launch(ctypes.Structure):
    """`Arguments` of kernels/fold.cuh."""
    _fields_ = [("out", ctypes.c_uint64), ("count", ctypes.c_uint64), ("operands", ctypes.c_uint32),
                ("wide", ctypes.c_uint32), ("out_wide", ctypes.c_uint32), ("ranks", ctypes.c_uint32),
                ("scaled", ctypes.c_uint32), ("absent", ctypes.c_uint32),
                ("operand", ctypes.c_uint64 * MAX_OPERANDS), ("scale", ctypes.c_uint64 * MAX_OPERANDS)]


class Module:
    """Loaded code, by the driver's own calls, as the library makes them."""

    def __init__(self, image):
        cupy.zeros(1)
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(self.module), image)
        self.functions = {}

    def call(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def function(self, op, dtype):
        name = f"unisono_fold_{op}_{dtype}"
        if name not in self.functions:
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
            self.functions[name] = function
        return self.functions[name]

    def launch(self, op, dtype, call, blocks, threads):
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        self.call("cuLaunchKernel", self.function(op, dtype), blocks, 1, 1, threads, 1, 1, 0,
                  ctypes.c_void_p(cupy.cuda.get_current_stream().ptr), parameters, None)


def host_library():
    path = Path(tempfile.mkdtemp()) / "host.so"
    subprocess.run(["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-o", path,
                    KERNELS / "host.cpp"], check=True)
    return ctypes.CDLL(str(path))


def elements(rng, dtype, count):
    """A quarter zeros, ones and extremes, a quarter small numbers, the rest any bits."""
    size = SIZES[dtype][0]
    unsigned = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32, 8: numpy.uint64}[size]
    values = rng.integers(0, 256, count * size, dtype=numpy.uint8).view(unsigned)
    top = {"F16": 0x7C00, "Bf16": 0x7F80, "F8E4M3": 0x7F, "F8E5M2": 0x7C, "F32": 0x7F800000, "F64": 0x7FF << 52}
    one = {"F16": 0x3C00, "Bf16": 0x3F80, "F8E4M3": 0x38, "F8E5M2": 0x3C, "F32": 0x3F800000, "F64": 0x3FF << 52}
    sign = 1 << (8 * size - 1)
    corners = [0, sign, 1, sign | 1, sign - 1, top.get(dtype, 2), top.get(dtype, 3) | sign, one.get(dtype, 5)]
    corners = numpy.array(corners, dtype=unsigned)
    kind = rng.integers(0, 4, count)
    values = numpy.where(kind == 0, corners[rng.integers(0, len(corners), count)], values)
    near_one = (numpy.uint64(one.get(dtype, 0)) ^ rng.integers(0, 8, count).astype(numpy.uint64)).astype(unsigned)
    return numpy.where(kind == 1, near_one, values).astype(unsigned).view(numpy.uint8)


def canonical(data, dtype, wide):
    """NaNs of accumulators have no fixed bits."""
    kind = numpy.float64 if dtype == "F64" else numpy.float32
    if dtype not in FLOATS or not wide:
        return data
    values = data.view(kind).copy()
    values[numpy.isnan(values)] = numpy.nan
    return values.view(numpy.uint8)


def check_folds(module, host):
    rng = numpy.random.default_rng(7)
    wrong = cases = 0
    layouts = [lambda i, s: 0, lambda i, s: s, lambda i, s: i % 3 * s, lambda i, s: (1, 3, 0)[i % 3]]
    for op, dtype in NAMES:
        size, wide_size = SIZES[dtype]
        for turn, (k, layout, mixed) in enumerate(itertools.product((1, 2, 3, 4, 5, 6, 7, 8, 9, 19, 32), range(4), (0, 1))):
            count = (70001, 4099, 1024, 33, 1)[turn % 5]
            wide = int(rng.integers(0, 1 << k)) if mixed else 0
            out_wide = mixed & turn // 8 & 1
            call = Launch(count=count, operands=k, wide=wide, out_wide=out_wide)
            if op == "Average" or (op == "Sum" and dtype in FLOATS and turn % 3 == 0):
                call.ranks = 0 if out_wide else int(rng.choice([1, 2, k, 7, 255, 256, 70000, 2**32 - 1]))
            if op == "Sum" and turn % 3 == 1:
                call.scaled = ((1 << k) - 1) & ~wide
                for i in range(k):
                    scale = (3.25, -0.5, 1.0)[i % 3]
                    if dtype == "F64":
                        call.scale[i] = int(numpy.float64(scale).view(numpy.uint64))
                    elif dtype in FLOATS:
                        call.scale[i] = int(numpy.float32(scale).view(numpy.uint32))
                    else:
                        call.scale[i] = (3, 2**63 + 5, 1)[i % 3] % 256**size
            inputs = []
            for i in range(k):
                is_wide = wide >> i & 1
                data = elements(rng, "F32" if is_wide and size < wide_size else dtype, count)
                inputs.append((data, layouts[layout](i, wide_size if is_wide else size)))
            out_size = wide_size if out_wide else size
            out_offset = layouts[layout](k, out_size)
            same = [i for i in range(k) if (wide_size if wide >> i & 1 else size) == out_size]
            in_place = same[0] if turn % 2 and same else None
            results = []
            for space in (numpy, cupy):
                arrays = []
                for i, (data, offset) in enumerate(inputs):
                    array = space.zeros(len(data) + 512, dtype=numpy.uint8)
                    base = array.ctypes.data if space is numpy else array.data.ptr
                    start = -base % 256 + offset
                    array[start:start + len(data)] = space.asarray(data)
                    arrays.append((array, start))
                    call.operand[i] = base + start
                out = space.full(count * out_size + 512, 0xA5, dtype=numpy.uint8)
                base = out.ctypes.data if space is numpy else out.data.ptr
                start = -base % 256 + out_offset
                call.out = base + start
                if in_place is not None:
                    out, start = arrays[in_place]
                    call.out = call.operand[in_place]
                blocks, threads = ((1, 32), (3, 96), (264, 256))[turn % 3]
                if space is numpy:
                    getattr(host, f"unisono_fold_{op}_{dtype}")(ctypes.byref(call), 1, 8)
                    result = out
                else:
                    module.launch(op, dtype, call, blocks, threads)
                    result = cupy.asnumpy(out)
                end = start + count * out_size
                outside = 0 if in_place is not None else 0xA5
                clean = (result[:start] == outside).all() and (result[end:] == outside).all()
                results.append((canonical(result[start:end].copy(), dtype, out_wide), clean))
            cases += 1
            if not (results[0][0] == results[1][0]).all() or not results[1][1]:
                wrong += 1
                if wrong <= 20:
                    at = int(numpy.argmax(results[0][0] != results[1][0])) // out_size
                    bits = [r[0][at * out_size:(at + 1) * out_size].tobytes().hex() for r in results]
                    print(f"WRONG {op} {dtype} k={k} layout={layout} wide={wide:#x} out_wide={out_wide} ranks={call.ranks} "
                          f"scaled={call.scaled:#x} count={count} at {at}: host {bits[0]} gpu {bits[1]} "
                          f"clean={results[1][1]}", flush=True)
    print(f"folds: {cases} cases, {wrong} wrong", flush=True)
    return wrong


def portable_module():
    """The conversions without the GPU's own instructions, compiled here."""
    from cupy_backends.cuda.libs import nvrtc
    source = (KERNELS / "fold.cu").read_text().replace(
        "FOR_EACH_KERNEL(KERNEL)", "KERNEL(Min, F16) KERNEL(Min, Bf16) KERNEL(Min, F8E4M3) KERNEL(Min, F8E5M2)")
    program = nvrtc.createProgram(source, "fold.cu", (), ())
    capability = cupy.cuda.Device().compute_capability
    try:
        nvrtc.compileProgram(program, (f"-arch=sm_{capability}", "-std=c++17", "-fmad=false", "-default-device",
                                       "-DUNISONO_PORTABLE", f"-I{KERNELS}"))
    except Exception:
        print(nvrtc.getProgramLog(program))
        raise
    return Module(bytes(nvrtc.getCUBIN(program)))


def check_conversions(module):
    """Every element widened, every float narrowed."""
    portable = portable_module()
    wrong = 0
    step = 1 << 28
    for dtype in ("F16", "Bf16", "F8E4M3", "F8E5M2"):
        size = SIZES[dtype][0]
        differing = 0
        outs = [cupy.empty(step * size, dtype=cupy.uint8) for _ in range(2)]
        for first in range(0, 1 << 32, step):
            floats = cupy.arange(first, first + step, dtype=cupy.uint32)
            for code, out in zip((module, portable), outs):
                call = Launch(out=out.data.ptr, count=step, operands=1, wide=1)
                call.operand[0] = floats.data.ptr
                code.launch("Min", dtype, call, 1056, 256)
            differing += int((outs[0] != outs[1]).sum())
        # Elements go through the vectors.
        count = 1 << 16
        raw = cupy.arange(count * size, dtype=cupy.uint8) if size == 1 else cupy.arange(count, dtype=cupy.uint16)
        for code, out in zip((module, portable), outs):
            call = Launch(out=out.data.ptr, count=count, operands=1)
            call.operand[0] = raw.data.ptr
            code.launch("Min", dtype, call, 8, 256)
        differing += int((outs[0][:count * size] != outs[1][:count * size]).sum())
        wrong += differing
        print(f"conversions of {dtype}: {differing} of 2^32 differ", flush=True)
    return wrong


def seconds(work, rounds):
    work()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(5):
        start.record()
        for _ in range(rounds):
            work()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3 / rounds)
    return sorted(times)[2]


def measure(module):
    processors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    pool = cupy.random.randint(0, 256, 9 << 30, dtype=cupy.uint8)

    def rate(op, dtype, k, size, blocks, offset=0, wide=0, out_wide=0, ranks=0, threads=256):
        element, accumulator = SIZES[dtype]
        call = Launch(count=size // element, operands=k, ranks=ranks, wide=wide, out_wide=out_wide)
        at, total = pool.data.ptr, 0
        for i in range(k + 1):
            is_wide = wide >> i & 1 if i < k else call.out_wide
            span = size // element * (accumulator if is_wide else element)
            address = at + (offset if i == 1 else 0)
            if i < k:
                call.operand[i] = address
            else:
                call.out = address
            at += span + 4096
            total += span
        taken = seconds(lambda: module.launch(op, dtype, call, blocks, threads), 20 if size < 1 << 28 else 4)
        return total / taken / 1e9

    a, b = pool[:1 << 30], pool[1 << 30:2 << 30]
    copied = 2 * a.nbytes / seconds(lambda: cupy.cuda.runtime.memcpyAsync(
        a.data.ptr, b.data.ptr, a.nbytes, 3, cupy.cuda.get_current_stream().ptr), 4) / 1e9
    print(f"\ncopy of 1 GiB: {copied:.0f} GB/s; {processors} multiprocessors")
    print("blocks a multiprocessor, f32 sum, 1 GiB: " + "; ".join(
        f"k={k}: " + " ".join(f"{n}: {rate('Sum', 'F32', k, 1 << 30 if k < 8 else 1 << 29, n * processors):.0f}" for n in (1, 2, 3, 4, 8))
        for k in (2, 8)))
    columns = [(k, size) for size in (64 << 20, 1 << 30) for k in (2, 4, 8)]
    print("GB/s" + " " * 16 + "".join(f"{f'k={k} {size >> 20}M':>12}" for k, size in columns))
    rows = [("Sum", t, 0) for t in FLOATS + UNSIGNED] + [("Sum", t, 8) for t in FLOATS]
    rows += [("Sum", t, 7) for t in ("F16", "F32", "F8E4M3")]
    rows += [("Max", t, 0) for t in FLOATS + ["I8", "I64"]] + [("Average", t, 8) for t in INTEGERS] + [("Xor", "U8", 0)]
    for op, dtype, ranks in rows:
        cells = []
        for k, size in columns:
            size = min(size, (8 << 30) // (k + 1))
            cells.append(rate(op, dtype, k, size // 16 * 16, 2 * processors, ranks=ranks))
        label = f"{op}{f' / {ranks}' if ranks else ''} {dtype}"
        print(f"{label:20}" + "".join(f"{cell:12.0f}" for cell in cells), flush=True)
    ways = [("2 elements, one off by an element", 2, {"offset": 1}), ("8 elements into accumulators", 8, {"out_wide": 1}),
            ("element and accumulator into accumulators", 2, {"wide": 1, "out_wide": 1}),
            ("2 accumulators into elements", 2, {"wide": 3}), ("accumulators into elements", 1, {"wide": 1})]
    for what, k, way in ways:
        cells = []
        for dtype in ("F16", "Bf16", "F32", "F8E4M3", "F8E5M2"):
            offset = way.get("offset", 0) * SIZES[dtype][0]
            cells.append(f"{dtype} {rate('Sum', dtype, k, 64 << 20, 2 * processors, **{**way, 'offset': offset}):.0f}")
        print(f"sum of 64 MiB, {what}: {', '.join(cells)}", flush=True)
    for size in (1024, 65536, 1 << 20):
        call = Launch(count=size // 4, operands=8, out=pool.data.ptr)
        for i in range(8):
            call.operand[i] = pool.data.ptr + (i + 1) * size
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            for _ in range(100):
                module.launch("Sum", "F32", call, max(1, min(size // 32 // 256, 4 * processors)), 256)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
        print(f"Sum F32 k=8 {size} bytes, in a graph: {cupy.cuda.get_elapsed_time(start, end) * 10:.2f} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="no speed")
    arguments = parser.parse_args()
    module = Module(lzma.decompress((KERNELS / "fold.sm_90.xz").read_bytes()))
    wrong = check_folds(module, host_library())
    wrong += check_conversions(module)
    if not arguments.quick:
        measure(module)
    print("WRONG" if wrong else "every bit as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
