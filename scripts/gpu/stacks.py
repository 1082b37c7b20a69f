#!/usr/bin/env python3
"""Where the threads of processes are that take too long, for a log: what the kernel tells, Python's stacks, native stacks.

    python3 scripts/gpu/stacks.py --after SECONDS [--out FILE] PID

Waits until the process PID has ended, or until so many seconds have passed; then writes, of it and its descendants: for each
thread its name, its state and the system call that it is in; the Python stacks, by faulthandler for programs that begin with
`Watch()`, and py-spy where there is one; and native stacks by gdb or cuda-gdb, where there is one. Each tool has
TOOL_SECONDS, all of it TOTAL_SECONDS. Appends to FILE; without one, stdout.

As a module, for a program that watches itself:

    watch = stacks.Watch(folder)
    with watch.within(60, "the name of what is done"):
        ...

What takes longer is told in the file stacks-PID of the folder (None: on stderr), and the process then ends with SIGKILL.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time

TOOL_SECONDS = 45  # PyTorch's symbols are many.
TOTAL_SECONDS = float(os.environ.get("STACKS_SECONDS", 60))
# A process may be looked at by those that it did not start, too (PR_SET_PTRACER, PR_SET_PTRACER_ANY).
SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)


def read(path):
    try:
        with open(path, errors="replace") as file:
            return file.read().replace("\0", " ").strip()
    except OSError as error:
        return f"({error.strerror})"


def family(pid):
    """The process and its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, read(f"/proc/{parent}/task/{task}/children").split())
    return found


def from_kernel(pid):
    lines = []
    for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
        at = f"/proc/{pid}/task/{task}"
        state = next((line.split()[1] for line in read(f"{at}/status").splitlines() if line.startswith("State")), "?")
        lines.append(f"thread {task} {read(f'{at}/comm')}: state {state}, in {read(f'{at}/wchan')}, call {read(f'{at}/syscall')}")
    return "\n".join(lines)


def by_tool(command, seconds):
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=seconds, text=True, errors="replace")
        return done.stdout
    except subprocess.TimeoutExpired as late:
        return f"{(late.stdout or b'').decode(errors='replace')}\n({command[0]} took longer than {seconds:.0f} s)"
    except OSError as error:
        return f"({command[0]}: {error.strerror})"


def has_handler(pid):
    """Whether the process has something to do on SIGUSR1, and does not just end."""
    caught = next((line.split()[1] for line in read(f"/proc/{pid}/status").splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) & 1 << signal.SIGUSR1 - 1)


def dump(pid, out, until):
    """Writes all that can be found out of one process."""
    print(f"--- process {pid}: {read(f'/proc/{pid}/cmdline')}", file=out)
    print(from_kernel(pid), file=out, flush=True)
    tools = [["py-spy", "dump", "--nonblocking", "--pid", str(pid)]]
    native = next((tool for tool in ("gdb", "cuda-gdb") if shutil.which(tool)), None)
    if native:
        tools.append([native, "-p", str(pid), "-nx", "-batch", "-ex", "set pagination off", "-ex", "thread apply all backtrace 40"])
    for command in tools:
        left = min(TOOL_SECONDS, until - time.monotonic())
        if shutil.which(command[0]) and left > 1:
            print(f"-- {command[0]}", by_tool(command, left), sep="\n", file=out, flush=True)
    # Last: it ends the system call that a thread is in.
    if has_handler(pid):
        print("(Python's stacks are on its stderr)", file=out, flush=True)
        os.kill(pid, signal.SIGUSR1)


def dump_family(pid, out, why):
    print(f"=== {time.strftime('%H:%M:%S')} {why}", file=out, flush=True)
    until = time.monotonic() + TOTAL_SECONDS
    for one in family(pid):
        if one != os.getpid():
            try:
                dump(one, out, until)
            except OSError as error:
                print(f"({one}: {error.strerror})", file=out, flush=True)


class Watch:
    """Watches the process that makes it, from another."""

    def __init__(self, folder=None):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        ctypes.CDLL(None).prctl(SET_PTRACER, ANY, 0, 0, 0)
        command = [sys.executable, os.path.abspath(__file__), "--follow", str(os.getpid())]
        if folder:
            command += ["--out", os.path.join(folder, f"stacks-{os.getpid()}")]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, text=True, start_new_session=True)

    @contextlib.contextmanager
    def within(self, seconds, name):
        self.tell(f"{seconds} {name}")
        try:
            yield
        finally:
            self.tell("")

    def tell(self, line):
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()


def follow(pid, out):
    """Reads what the process begins, a line each: seconds and a name, or nothing when it is done. Ends with it."""
    import select

    pending, buffered = None, b""
    while True:
        left = None if pending is None else max(pending[0] - time.monotonic(), 0)
        if select.select([0], [], [], left)[0]:
            got = os.read(0, 4096)
            if not got:
                return
            *lines, buffered = (buffered + got).split(b"\n")
            for line in lines:
                seconds, _, name = line.decode().partition(" ")
                pending = (time.monotonic() + float(seconds), float(seconds), name) if seconds else None
        elif pending:
            began = time.monotonic()
            dump_family(pid, out(), f"{pending[2]} has taken longer than {pending[1]:g} s")
            # Other processes of the job have the same trouble: what ends with this one must not cut their words short.
            time.sleep(max(began + TOTAL_SECONDS - time.monotonic(), 0))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int)
    parser.add_argument("--after", type=float, default=0)
    parser.add_argument("--out")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()

    def out():
        return open(options.out, "a") if options.out else sys.stdout

    if options.follow:
        return follow(options.pid, out)
    until = time.monotonic() + options.after
    while time.monotonic() < until:
        if read(f"/proc/{options.pid}/stat").rpartition(")")[2].split()[:1] in ([], ["Z"]):
            return None
        time.sleep(0.2)
    dump_family(options.pid, out(), f"{options.pid} has run for {options.after:g} s")


if __name__ == "__main__":
    main()
