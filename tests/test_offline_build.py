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

from inductor_ext.attention.captured import CapturedGradients, Plan
from inductor_ext.attention.kinds import Reduction
from inductor_ext.attention.tiles import backward_config, forward_config
from inductor_ext.core.target import Target
from tests.attention.attention_kernels import ATTENTIONS, sources
from tests.mlstm.test_compiled import emitted
from tests.scan import test_linear_scan, test_scan_backward, test_scan_forward
from tests.support.emitted import segment_kernels, signature
from tests.support.targets import on_target

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are built and run by test_gpu.py"),
]

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
    axes = {Reduction.SUM: (False, True, False, False)}
    plans = [Plan(i, None, k, axes.get(k, (True,) * 4), False, False, None, wide=False) for i, k in enumerate(kinds)]
    return CapturedGradients({}, plans=plans)


CAPTURED = {
    "unmasked": gradients(),
    "causal": gradients(),
    "relative": gradients(Reduction.STRIP),
    "scaled_and_gathered": gradients(Reduction.SUM, Reduction.SCATTER),
}


def kernel_options(direction, config):
    tiles = {n: size for n, size in dataclasses.asdict(config).items() if n.startswith("block")}
    return {f"{direction}_{name.upper()}": size for name, size in tiles.items()}


#: Bytes of stack a thread, where every tile without any was measured to be slower (benchmarks/NOTES.md).
SPILLS = {("relative", 90, "backward"): 224}


def builds(names, quick):
    """Every name on every architecture; those that are not in ``quick`` are slow."""
    every = [(*(name if isinstance(name, tuple) else (name,)), arch) for name in names for arch in STOCK]
    return [pytest.param(*x, marks=[] if x in quick else [pytest.mark.slow]) for x in every]


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "name, arch",
    builds(ATTENTIONS, {("relative", 90), ("causal", 100)}),
)
def test_builds_without_spills_and_adds_in_fp32(name, arch, tmp_path):
    stock_forward, stock_backward = STOCK[arch]
    score_mod, mask_mod, one_pass = name not in ("unmasked", "causal"), name == "causal", arch >= 90
    chained_reads = name == "scaled_and_gathered"
    family = dataclasses.replace(Target.of(torch.device("cpu")), architecture=arch).family
    functions = {"score_mod": score_mod, "mask_mod": mask_mod, "chained_reads": chained_reads}
    forward = forward_config(stock_forward, family, head_dim=64, **functions)
    backward = backward_config(stock_backward, family, CAPTURED[name], one_pass=one_pass, mask_mod=mask_mod, head_dim=64)
    emitted = sources(name, arch=arch, **kernel_options("fwd", forward), **kernel_options("bwd", backward))
    assert one_pass == ("dq_tiles.atomic_add" in emitted["backward"])
    for direction, config in {"forward": forward, "backward": backward}.items():
        ptx, cubin = build(tmp_path, emitted[direction], arch, config.num_warps, config.num_stages)
        assert local_memory_bytes(cubin) <= SPILLS.get((name, arch, direction), 0), (direction, config)
    adds = re.findall(r"(?:red|atom)[\w.]*global[\w.]*add[\w.]*", ptx)
    assert bool(adds or "cp.reduce.async.bulk" in ptx) == (score_mod or one_pass)
    assert all("f32" in add for add in adds)


@pytest.mark.breadth(0)
@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (80, 100))])
def test_sorted_segments_build_without_spills(arch, tmp_path):
    for number, (source, num_warps) in enumerate(segment_kernels()):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, cubin = build(folder, source, arch, num_warps, 1)
        assert local_memory_bytes(cubin) == 0


SCANS = {
    "lanes": lambda dtype: test_linear_scan.emitted(20, dtype),
    "rows": lambda dtype: test_linear_scan.emitted(1, dtype),
    "backward": lambda dtype: test_scan_backward.emitted(test_scan_backward.matrix_product, dtype),
    "forward": lambda dtype: test_scan_forward.emitted(test_scan_forward.matrix_product, dtype),
    "constants": lambda dtype: test_scan_forward.emitted(test_scan_forward.segmented, dtype),
    "conditions": lambda dtype: test_scan_forward.emitted(test_scan_forward.either_and_sum, dtype),
}
#: Bytes of stack a thread: the tile was the fastest all the same.
SCAN_SPILLS = {("lanes", torch.bfloat16, 90): 16}


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    "name, dtype, arch",
    builds(
        [(name, dtype) for name in SCANS for dtype in (torch.float32, torch.bfloat16)],
        {("lanes", torch.float32, 90), ("backward", torch.float32, 90), ("constants", torch.float32, 90)},
    ),
)
def test_scans_build_without_spills(name, dtype, arch, tmp_path):
    source = SCANS[name](dtype)
    num_warps = int(re.search(r"num_warps=(\d+)", source).group(1))
    _, cubin = build(tmp_path, source, arch, num_warps, 1)
    assert local_memory_bytes(cubin) <= SCAN_SPILLS.get((name, dtype, arch), 0)


#: Bytes of stack a thread by (width, dtype, arch, direction): what no tile that was tried avoids.
MLSTM_SPILLS = {
    (256, torch.bfloat16, 90, "forward"): 8,
    (256, torch.float32, 80, "backward"): 312,
    (256, torch.float32, 90, "backward"): 264,
    (256, torch.float32, 100, "backward"): 264,
}


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    "width, dtype, arch",
    builds(
        [(w, BF16) for w in (64, 128, 256, 512)] + [(w, FP32) for w in (64, 256)],
        {(128, BF16, 90), (512, BF16, 100)},
    ),
)
def test_mlstm_builds_without_spills(width, dtype, arch, tmp_path):
    with on_target(architecture=arch):
        sources = emitted(width, width, dtype, length=16)
    for direction, source in zip(("forward", "backward"), sources, strict=True):
        folder = tmp_path / direction
        folder.mkdir()
        warps, stages = (int(re.search(rf"{name}=(\d+)", source).group(1)) for name in ("num_warps", "num_stages"))
        _, cubin = build(folder, source, arch, warps, stages)
        assert local_memory_bytes(cubin) <= MLSTM_SPILLS.get((width, dtype, arch, direction), 0), direction
