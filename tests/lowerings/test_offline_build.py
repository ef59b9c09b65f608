"""Build the emitted kernels for GPUs that are not here: they build, do not spill, and add in fp32."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from inductor_ext.lowerings.captured_gradients import CapturedGradients, Kind, Plan
from inductor_ext.lowerings.flex_tiles import backward_config, forward_config
from tests.emitted import signature

from .attention_kernels import ATTENTIONS, sources

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are built and run by test_gpu.py")

#: Run without the interpreter, which is chosen when Triton is imported.
BUILD = textwrap.dedent(
    """
    import importlib.util, json, sys
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    job = json.load(open(sys.argv[1]))
    spec = importlib.util.spec_from_file_location("kernel", job["path"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, job["name"])
    source = ASTSource(kernel, job["signature"], {}, {(i,): [["tt.divisibility", 16]] for i in job["pointers"]})
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"]}
    built = triton.compile(source, target=GPUTarget("cuda", job["arch"], 32), options=options)
    open(job["path"] + ".cubin", "wb").write(built.asm["cubin"])
    open(job["path"] + ".ptx", "w").write(built.asm["ptx"])
    """
)


def build(tmp_path, source, arch, num_warps, num_stages):
    types = signature(source)
    name = re.search(r"^def (\w+)\(", source, re.MULTILINE).group(1)
    plain = re.sub(r"@triton_heuristics\.template\(.*?\n\)\n", "", source, flags=re.DOTALL)
    path = tmp_path / "kernel.py"
    path.write_text(plain)
    job = {
        "path": str(path),
        "name": name,
        "signature": types,
        "pointers": [i for i, t in enumerate(types.values()) if t.startswith("*")],
        "arch": arch,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "build.py").write_text(BUILD)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(tmp_path / "build.py"), str(tmp_path / "job.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return Path(f"{path}.ptx").read_text(), Path(f"{path}.cubin")


def local_memory_bytes(cubin):
    """Stack bytes a thread, where spilled registers go, by the cuobjdump that Triton's package carries."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(tool) if tool.exists() else shutil.which("cuobjdump")
    done = subprocess.run([tool, "--dump-resource-usage", str(cubin)], capture_output=True, text=True, check=True)
    return max(int(n) for n in re.findall(r"STACK:(\d+)", done.stdout))


@dataclasses.dataclass(frozen=True)
class Forward:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Backward:
    block_m1: int
    block_n1: int
    block_m2: int
    block_n2: int
    num_warps: int
    num_stages: int


#: What Inductor's tables choose at head dim 64 in bf16, before flex_tiles.py.
STOCK = {
    80: (Forward(128, 64, 4, 3), Backward(64, 64, 64, 64, 4, 2)),
    90: (Forward(128, 128, 4, 3), Backward(64, 128, 128, 64, 8, 3)),
    100: (Forward(128, 128, 4, 3), Backward(64, 128, 128, 64, 4, 3)),
}


def gradients(*kinds):
    """Captured gradients of these kinds, as far as the choice of tiles looks at them."""
    axes = {Kind.SUM: (False, True, False, False)}
    plans = [
        Plan(i, None, k, None, axes.get(k, (True,) * 4), False, False, False, False, wide=False) for i, k in enumerate(kinds)
    ]
    return CapturedGradients({}, plans=plans)


CAPTURED = {
    "unmasked": gradients(),
    "causal": gradients(),
    "relative": gradients(Kind.SCATTER),
    "scaled_and_gathered": gradients(Kind.SUM, Kind.SCATTER),
}


def tiled(source, config):
    for name, size in dataclasses.asdict(config).items():
        if name.startswith("block"):
            source, count = re.subn(
                rf"{name.upper()} : tl\.constexpr = \d+", f"{name.upper()} : tl.constexpr = {size}", source
            )
            assert count == 1
    return source


@pytest.mark.parametrize("arch", STOCK)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_builds_without_spills_and_adds_in_fp32(name, arch, tmp_path):
    emitted = sources(name, arch=arch)
    forward, backward = STOCK[arch]
    score_mod = name not in ("unmasked", "causal")
    one_pass = "dq_ptrs = DQ + (rows" in emitted["backward"]
    assert one_pass == (arch >= 90)
    configs = {
        "forward": forward_config(
            forward, arch, score_mod=score_mod, mask_mod=name == "causal", chained_reads=name == "scaled_and_gathered"
        ),
        "backward": backward_config(
            backward, arch, CAPTURED[name], one_pass=one_pass, mask_mod=name == "causal", head_dim=64
        ),
    }
    for direction, config in configs.items():
        ptx, cubin = build(tmp_path, tiled(emitted[direction], config), arch, config.num_warps, config.num_stages)
        assert local_memory_bytes(cubin) == 0, (direction, config)
    adds = re.findall(r"(?:red|atom)[\w.]*global[\w.]*add[\w.]*", ptx)
    assert bool(adds) == (score_mod or one_pass)
    assert all("f32" in add for add in adds)
