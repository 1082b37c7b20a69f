"""PyTorch's own tests of torch.distributed over whatever libnccl.so.2 is loaded.

    torch_tests.py [--ranks N] [--lanes L] [--limit S] [--backend B] [--expect PART] [--failed FILE] [--only FILE] [--out DIR]
                   [--patterns P,...] [TEST.py ...]

Without files: all of torch.testing's distributed_test, which is in PyTorch's wheel, for N ranks (as many as there are GPUs). With files:
the tests in them, such as test/distributed/test_c10d_nccl.py of PyTorch's sources. PyTorch starts new processes for each test, which
takes longer than most tests; here they are forked from one that has imported everything, unless that has used the driver. L tests (4)
run at a time, on the same GPUs; one that takes more than S seconds (120) has failed.

--patterns runs tests whose names have one of them, --only those that a file names, a line each; --failed writes such a file of what
failed. --expect is a part of the path of the library that must be in use, --out a folder for what the tests print. Prints what failed,
and why, and a line that counts; the status is 1 if anything failed.
"""

import argparse
import importlib.util
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest

# Whether there are GPUs is asked without the driver, which would not work in who is forked after that.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

OK, SKIPPED, FAILED = 0, 3, 1
ERROR = re.compile(r"\b(\w+\.)*\w*(Error|Exception|Mismatch|Timeout)\b: ?(.*)")


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--expect")
    parser.add_argument("--failed")
    parser.add_argument("--only")
    parser.add_argument("--patterns")
    parser.add_argument("--out", default=tempfile.gettempdir())
    parser.add_argument("files", nargs="*")
    return parser.parse_args()


arguments = parsed()
import torch  # noqa: E402

ranks = arguments.ranks or torch.cuda.device_count()
os.environ.update(BACKEND=arguments.backend, WORLD_SIZE=str(ranks), TEMP_DIR=tempfile.gettempdir())

from torch.testing._internal import common_distributed, common_utils  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

# Multicast is not for these machines; and to look which tests PyTorch has disabled imports what uses the driver.
common_distributed.requires_multicast_support = lambda: unittest.skip("multicast")
common_utils.check_if_enable = lambda test: None


class TestDistributed(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The tests of the wheel, as PyTorch's test_distributed_spawn.py has them."""

    def setUp(self):
        super().setUp()
        self._spawn_processes()
        self.addCleanup(self.settings.__exit__, None, None, None)

    def run(self, result=None):
        self.settings = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        self.settings.__enter__()
        return super().run(result)


def flattened(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flattened(test)
        else:
            yield test


def tests():
    """Every test there is, by its name."""
    loader = unittest.defaultTestLoader
    if not arguments.files:
        yield from flattened(loader.loadTestsFromTestCase(TestDistributed))
    for path in arguments.files:
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        name = os.path.splitext(os.path.basename(path))[0]
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield from (test for test in flattened(loader.loadTestsFromModule(module)) if type(test).__module__ == name)


class Running:
    """A test in a process of its own, which forks its ranks."""

    def __init__(self, test):
        self.name = ".".join(test.id().split(".")[-2:])
        self.log = os.path.join(arguments.out, f"{self.name}.log")
        self.began = time.monotonic()
        self.result = None
        self.pid = os.fork()
        if self.pid:
            return
        status = FAILED
        try:
            os.setsid()
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            told = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite([test]))
            status = FAILED if not told.wasSuccessful() else SKIPPED if told.skipped else OK
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def seconds(self):
        return time.monotonic() - self.began

    def ended(self):
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.result = os.waitstatus_to_exitcode(status)
        elif self.seconds() > arguments.limit:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.result = "too late"
        return self.result is not None

    def why(self):
        """The first error that tells of more than that there was one."""
        lines = open(self.log, errors="replace").read().splitlines()
        found = [line for line in lines if ERROR.search(line) and "Caught exception" not in line]
        told = ERROR.search(found[0]).group(0) if found else (lines or ["nothing printed"])[-1]
        return f"({self.result}) {told[:230]}"


def forks_can_use_gpus():
    """Not if what was imported has used the driver."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.zeros(1, device="cuda")
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def main():
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libnccl.so" in line}
    if arguments.expect and not any(arguments.expect in path for path in libraries):
        sys.exit(f"the library in use is {libraries}, not one of {arguments.expect}")
    os.makedirs(arguments.out, exist_ok=True)
    waiting = list(tests())[::-1]
    if arguments.backend != "nccl" or forks_can_use_gpus():
        forked = torch.multiprocessing.get_context("fork").Process
        common_distributed.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(forked)
    if arguments.patterns:
        waiting = [test for test in waiting if any(part in test.id() for part in arguments.patterns.split(","))]
    if arguments.only:
        names = set(open(arguments.only).read().split())
        waiting = [test for test in waiting if ".".join(test.id().split(".")[-2:]) in names]
    running, results, began = [], {}, time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before the last test"))
    try:
        run(waiting, running, results)
    finally:
        for test in running:
            os.killpg(test.pid, signal.SIGKILL)
        tell(results, time.monotonic() - began)
    sys.exit(any(result not in (OK, SKIPPED) for result in results.values()))


def run(waiting, running, results):
    while waiting or running:
        while waiting and len(running) < arguments.lanes:
            running.append(Running(waiting.pop()))
        for test in [test for test in running if test.ended()]:
            running.remove(test)
            results[test.name] = test.result
            if test.result not in (OK, SKIPPED):
                print(f"{test.name} {test.why()}", flush=True)
            if test.seconds() > 20:
                print(f"{test.name} took {test.seconds():.0f} s", flush=True)
        time.sleep(0.01)


def tell(results, seconds):
    failed = sorted(name for name, result in results.items() if result not in (OK, SKIPPED))
    if arguments.failed:
        with open(arguments.failed, "w") as file:
            file.writelines(f"{name}\n" for name in failed)
    told = list(results.values())
    print(f"torch-tests: {ranks} ranks, {told.count(OK)} ok, {told.count(SKIPPED)} skipped, {len(failed)} failed, {seconds:.0f} s",
          flush=True)


if __name__ == "__main__":
    main()
