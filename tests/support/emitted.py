"""Get at the Triton source that a compiled function emits, normalised so that it reads the same on every torch."""

import ast
import contextlib
import re
from unittest import mock

import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code

from .interpreter import triton_on_cpu


def triton_sources(function, *inputs, tma=False):
    """The source of every gradfuse template kernel that compiling ``function`` forward and backward emits."""

    def step():
        out = function(*inputs)
        leaves = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(out.sum(), leaves)

    with triton_on_cpu(tma):
        _, codes = run_and_get_code(step)
    return [k for code in codes for k in kernels_of(code) if "LOG2E" in k]


def kernels_of(code):
    """The source of every Triton kernel in a module that Inductor wrote."""
    return re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code, re.DOTALL)


def segment_kernels(width=2048):
    """The two kernels of segment_sum for bf16 rows of that width, each with its number of warps."""
    from inductor_ext.gathers.row_sums import segment_sum

    keys, order = torch.randint(0, 50, (200,)).sort(stable=True)
    run = torch.compile(lambda v: segment_sum(v, order, keys, 0, 50, torch.bfloat16), backend="gradfuse")
    torch._dynamo.reset()
    with triton_on_cpu():
        _, (code,) = run_and_get_code(run, torch.randn(200, width).bfloat16())
    kernels = [k for k in kernels_of(code) if "CHUNK" in k]
    return [(k, int(re.search(r"num_warps=(\d+)", k).group(1))) for k in kernels]


def counting_kernels(count=65536, rows=50257):
    """The three kernels of counted_order by name, each with its number of warps."""
    from inductor_ext.gathers.row_sums import counted_order

    torch._dynamo.reset()
    run = torch.compile(lambda k: counted_order(k, rows), backend="gradfuse", dynamic=False)
    codes = []

    def save(code):
        """Keep the code, and stop: the interpreter would take seconds for so many keys."""
        codes.append(code)
        raise RuntimeError("the code is known")

    with triton_on_cpu(), mock.patch.object(GraphLowering, "save_output_code", save), contextlib.suppress(Exception):
        run(torch.zeros(count, dtype=torch.int32))
    own = {"key_counts": "BLOCK_COLUMNS", "key_starts": "BLOCK_P", "key_places": "TILES"}
    kernels = {
        name: next(k for code in codes for k in kernels_of(code) if f"{option} :" in k) for name, option in own.items()
    }
    return {name: (k, int(re.search(r"num_warps=(\d+)", k).group(1))) for name, k in kernels.items()}


def entry_sums_kernel(heads=32, entries=512, parts=2):
    """The kernel of entry_sums."""
    from inductor_ext.gathers.row_sums import entry_sums

    index = torch.randint(0, entries, (2, 100), dtype=torch.int32)
    return _kernel_of_sums(lambda v: entry_sums(v, index, entries, parts), torch.randn(2, heads, 100))


def bin_sums_kernel(slices=(2, 16), bins=512, parts=3):
    """The kernel of bin_sums."""
    from inductor_ext.gathers.row_sums import bin_sums

    index = torch.randint(0, bins, (2, 100), dtype=torch.int32)
    return _kernel_of_sums(lambda v: bin_sums(v, index, bins, parts), torch.randn(*slices, 2, 100))


def _kernel_of_sums(function, *operands):
    torch._dynamo.reset()
    with triton_on_cpu():
        _, (code,) = run_and_get_code(torch.compile(function, backend="gradfuse"), *operands)
    return next(k for k in kernels_of(code) if "BLOCK_E" in k)


def body(source):
    """The kernel's code without imports, decorators, names of buffers and Inductor's own annotations."""
    text = source[source.index("def triton_") :]
    text = re.sub(r"def triton_\w+\(.*?\):", "def kernel(...):", text, count=1, flags=re.DOTALL)
    text = re.sub(r"^ *\w+ : tl\.constexpr = .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"tl\.full\(\[1?\], ([^,]+), tl\.\w+\)", r"\1", text)
    text = re.sub(r"tl\.(maximum|minimum)\((.*), tl\.PropagateNan\.ALL\)", r"triton_helpers.\1(\2)", text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def signature(source):
    """Argument name -> Triton type, from Inductor's triton_meta."""
    return ast.literal_eval(re.search(r"'signature': (\{.*?\})", source).group(1))
