"""Build emitted kernels for GPUs that are not here, and read what a built kernel needs."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inductor_ext.core.target import SHARED_MEMORY
from tests.support import kernel_builder
from tests.support.emitted import signature

#: Since 9.0, ptxas counts as static what the driver reserves in each block. A device's limit does not include it.
RESERVED_SINCE_HOPPER = 1024
#: The architectures that kernels are built for.
ARCHITECTURES = (80, 90, 100, 120)
#: The same as cases of a test. The quick suite builds for Hopper only.
QUICK_ARCHITECTURES = [pytest.param(arch, marks=[] if arch == 90 else pytest.mark.slow) for arch in ARCHITECTURES]
#: The mark of tests that build kernels for GPUs that are not here.
OFFLINE = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are built and run by other tests")


def builds(names, quick):
    """Every name on every architecture; those that are not in ``quick`` are slow."""
    every = [(*(name if isinstance(name, tuple) else (name,)), arch) for name in names for arch in ARCHITECTURES]
    return [pytest.param(*x, marks=[] if x in quick else [pytest.mark.slow]) for x in every]


@dataclasses.dataclass(frozen=True)
class Built:
    """A kernel that was built for an architecture.

    path: that of its source, beside which are the files of the build. ttir: Triton's own representation of it, after the passes
    that are the same for all GPUs. log: what ptxas says of the kernel. stack: the bytes of a thread's stack, where spilled
    registers go. shared_memory: the bytes that a program uses.
    """

    name: str
    arch: int
    path: Path
    ttir: str
    ptx: str
    log: str
    stack: int
    shared_memory: int

    def check(self, spills=0):
        """Assert that no more than ``spills`` bytes are spilled, and that the GPU has enough shared memory."""
        assert self.stack <= spills, f"{self.name} spills {self.stack} bytes on sm_{self.arch}, expected {spills}"
        limit = SHARED_MEMORY[self.arch]
        needs = f"{self.name} needs {self.shared_memory} bytes of shared memory, and sm_{self.arch} has {limit}"
        assert self.shared_memory <= limit, needs

    def check_loops(self):
        """Assert that the kernel has a loop, and that no spilled register is moved inside of one."""
        loops, moves = loops_and_spills(_cuobjdump("-sass", self.path))
        assert loops, f"{self.name} has no loop"
        assert not moves, f"{self.name} moves spilled registers inside of its loops on sm_{self.arch}: {moves}"

    def check_matmuls(self):
        """Assert that the kernel has matmuls of a warpgroup, and that ptxas lets them run beside other work."""
        assert "wgmma.mma_async" in self.ptx, f"{self.name} has no matmul of a warpgroup"
        assert "registers" in self.log, f"{self.name} was built without ptxas's log"
        waits = [line for line in self.log.splitlines() if "wgmma" in line]
        assert not waits, f"{self.name} waits for each matmul: {waits}"


class Builder:
    """One process that builds kernels, one after the other: importing Triton and torch takes longer than most builds.

    The process lives until the ``with`` block ends. If a build kills it, only that build fails, and the next build starts a
    new process.
    """

    def __init__(self, folder):
        self.folder = folder
        self._process = None
        self._count = 0

    def build(self, source, arch, num_warps, num_stages):
        """Build the Triton source of one emitted kernel."""
        name = re.search(r"^def (\w+)\(", source, re.MULTILINE).group(1)
        # Triton reads the source again by its path, and Python remembers what it read, so each kernel has its own path.
        self._count += 1
        path = self.folder / f"kernel_{self._count}.py"
        path.write_text(re.sub(r"@triton_heuristics\.template\(.*?\n\)\n", "", source, flags=re.DOTALL))
        job = {"path": str(path), "name": name, "signature": signature(source), "arch": arch}
        reply = self._answer({**job, "num_warps": num_warps, "num_stages": num_stages})
        assert "error" not in reply, f"{name} for sm_{arch} was not built ({path}):\n{reply['error'][-3000:]}"
        used = _resource_usage(path)
        static = used["SHARED"] - (RESERVED_SINCE_HOPPER if arch >= 90 else 0)
        ttir, ptx = (Path(f"{path}.{form}").read_text() for form in ("ttir", "ptx"))
        return Built(name, arch, path, ttir, ptx, reply["log"], used["STACK"], reply["shared"] + static)

    def _answer(self, job):
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        return {"error": f"the builder ended with {self._process.wait()}: {self._log.read_text()}"}

    def _start(self):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # A kernel from Triton's cache would have no log.
        environment |= {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
        self._end()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, kernel_builder.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )

    @property
    def _log(self):
        return self.folder / "builder.log"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end()

    def _end(self):
        if self._process is not None:
            self._process.communicate()


def loops_and_spills(sass):
    """Return the loops of a kernel, each as its first and last address, and the moves of spilled registers inside of them.

    sass: the machine code as ``cuobjdump`` prints it. A loop ends with a branch to an address before the branch.
    """
    lines = [(int(address, 16), code.strip()) for address, code in re.findall(r"/\*([0-9a-f]{4,5})\*/([^;\n]*)", sass)]
    branches = [(int(to, 16), address) for address, code in lines for to in re.findall(r"\bBRA\b.*?0x([0-9a-f]+)", code)]
    loops = [(first, last) for first, last in branches if first < last]
    moves = [(address, code) for address, code in lines if re.search(r"\b(STL|LDL)\b", code)]
    return loops, [code for address, code in moves if any(first <= address <= last for first, last in loops)]


def _resource_usage(path):
    """What the only kernel of a cubin uses."""
    (line,) = re.findall(r"REG:.*", _cuobjdump("--dump-resource-usage", path))
    return {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", line)}


def _cuobjdump(what, path):
    """What the cuobjdump that Triton's package carries prints of the cubin of a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(tool) if tool.exists() else shutil.which("cuobjdump")
    return subprocess.run([tool, what, f"{path}.cubin"], capture_output=True, text=True, check=True).stdout
