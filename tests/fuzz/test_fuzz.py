"""300 random programs on fresh seeds, and tests of the fuzzer itself. ``GRADFUSE_FUZZ_SEED`` repeats a run."""

import dataclasses
import os
import secrets
from unittest import mock

import pytest
import torch

from inductor_ext import backend, passes

from .judge import judge
from .program import Program
from .runner import FAMILIES, Settings, generate, run, work
from .runs import reference

#: The number of programs of each family. These are 300 programs, and they take two minutes on two cores.
PROGRAMS = {"score_mods": 25, "scans": 25, "attentions": 50, "indices": 120, "casts": 80}


@pytest.mark.breadth(0)
def test_fresh_programs():
    first = int(os.environ.get("GRADFUSE_FUZZ_SEED") or secrets.randbelow(10**9))
    # The slow families are first, so that the workers end at the same time.
    jobs = [(family, first + i) for family in PROGRAMS for i in range(PROGRAMS[family])]
    summary = run(jobs, Settings(device="cpu", mode="graphs"), workers=2)
    assert len(summary.outcomes) == len(jobs)
    discarded = [o for o in summary.outcomes if o.outcome == "discarded"]
    assert len(discarded) < 0.2 * len(jobs), discarded
    failures = summary.failures()
    listed = "\n".join(f"{o.family}:{o.seed} {o.outcome}: {o.reason}" for o in failures)
    sources = "\n\n".join(generate(o.family, o.seed).show() for o in failures[:10])
    assert not failures, f"GRADFUSE_FUZZ_SEED={first}: {len(failures)} of {len(jobs)} programs fail\n{listed}\n\n{sources}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_is_one_program(family):
    for seed in range(20):
        program = generate(family, seed)
        assert program == generate(family, seed)
        compile(program.show(), "program", "exec")


_GATHER = """import torch


def make(g, device):
    key = torch.randperm(12, generator=g).to(device)
    x = torch.randn([12, 4], generator=g).to(device, torch.{dtype}).requires_grad_()
    return [key, x]


def program(key, x):
    return x.new_zeros([12, 4]).index_add(0, key.argsort() // 2, x * 2)
"""

_ATTENTION = """import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def make(g, device):
    query, key, value = (torch.randn([1, 2, 16, 16], generator=g).to(device).requires_grad_() for _ in range(3))
    t = torch.randn([2, 31], generator=g).to(device).requires_grad_()
    return [query, key, value, t]


def program(query, key, value, t):
    return flex_attention(query, key, value, score_mod=lambda s, b, h, q, k: s + t[h, q - k + 15])
"""

_CASTS = """import torch


def make(g, device):
    return [torch.randn([4, 6], generator=g).to(device)]


def program(x):
    y = x.bfloat16().t()
    x.add_(1)
    return y.float(), y
"""

_SCAN = """import torch
from torch._higher_order_ops.associative_scan import associative_scan


def make(g, device):
    return [torch.randn([9, 3], generator=g).to(device).requires_grad_()]


def program(x):
    return associative_scan(lambda left, right: left + right, x, 0, combine_mode="pointwise")
"""

KNOWN = {
    "indices": Program("indices", -1, _GATHER.replace("{dtype}", "float32")),
    "half": Program("indices", -2, _GATHER.replace("{dtype}", "bfloat16"), "bfloat16"),
    "score_mods": Program("score_mods", -3, _ATTENTION),
    "casts": Program("casts", -4, _CASTS, exact=True, strides=True),
    "scans": Program("scans", -5, _SCAN),
}


def _spoilt(scale):
    """Scale the outputs of everything that is compiled."""

    def compile_fx(gm, example_inputs, **kwargs):
        compiled = original(gm, example_inputs, **kwargs)

        def run(*arguments):
            return torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda x: x * scale if x.is_floating_point() else x, compiled(*arguments)
            )

        return run

    original = backend.config.compile_fx
    return mock.patch.object(backend.config, "compile_fx", compile_fx)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", KNOWN)
def test_a_right_result_passes(name):
    result = judge(KNOWN[name])
    assert result.outcome == "ok", result


def test_a_gradient_whose_terms_cancel_is_compared_with_flex_attention_in_eager_mode():
    """A table that is added to a whole row of scores: the exact gradient is zero there, and that of another row is small.

    Eager flex_attention subtracts the sum over keys of output times its gradient, as kernels do, and is off by 1.4e-5. The
    backward of softmax is off by 3e-6, and is not what flex_attention computes.
    """
    assert judge(generate("score_mods", 600000)).outcome == "ok"


@pytest.mark.breadth(0)
def test_one_number_whose_terms_cancel_is_judged_over_many_draws():
    """A table of one entry: in the first draw its gradient is off by three times what is allowed, over all by half of it."""
    assert judge(generate("score_mods", 893479846)).outcome == "ok"


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", KNOWN)
def test_a_planted_wrong_result_is_found(name):
    half = name == "half"
    with _spoilt(1.05 if half else 1.001):
        result = judge(KNOWN[name])
    assert result.outcome == "wrong", result


def test_stock_is_judged_over_the_same_draws():
    """A result of stock with the same errors, which are small in the first draw and large in the others."""

    def off(program, device, mode, stock, draws, options=None):
        runs = [reference(program, device, draw) for draw in draws]
        for run_, draw in zip(runs, draws, strict=True):
            run_.outputs = [(x * (1.1 if draw else 1.01)).float() for x in run_.outputs]
            run_.gradients = [None if x is None else x.float() for x in run_.gradients]
        return runs

    with mock.patch("tests.fuzz.judge.compiled", off), mock.patch("tests.fuzz.judge.DRAWS", 8):
        result = judge(KNOWN["indices"])
    assert result.outcome == "stock_too", result


def test_a_crash_is_found():
    def broken(*args, **kwargs):
        raise ValueError("planted")

    with mock.patch.object(passes.scatters, "rewrite", broken):
        result = judge(KNOWN["indices"])
    assert result.outcome == "crash" and "planted" in result.reason


def test_a_crash_of_the_forward_of_stock_is_no_crash_of_gradfuse():
    """As attentions:5100012: stock's forward is the one that fails if it need not keep an index for the backward."""

    def broken(*args, **kwargs):
        raise ValueError("planted")

    planted = mock.patch.object(passes.scatters, "rewrite", broken)
    with planted, mock.patch("tests.fuzz.judge.forward_of_stock", broken):
        assert judge(KNOWN["indices"]).outcome == "stock_crashes_too"


def test_an_invalid_program_is_discarded():
    source = KNOWN["indices"].source.replace("index_add(0,", "index_add(2,")
    assert judge(dataclasses.replace(KNOWN["indices"], source=source)).outcome == "discarded"


def test_a_worker_ends_when_its_gpu_is_lost(capsys):
    # The runner gives the rest of its programs to a new process. In this one eager mode would raise for all of them.
    with mock.patch("tests.fuzz.judge.context_lost", return_value=True):
        work([("casts", 0), ("casts", 1)], Settings())
        assert capsys.readouterr().out.count("start") == 1
        with mock.patch.object(passes.scatters, "rewrite", side_effect=ValueError):
            assert judge(KNOWN["indices"], mode="compiled").outcome == "crash"


@pytest.mark.breadth(0)
def test_a_hung_program_is_a_crash():
    # The first attention of a process takes longer than a second.
    summary = run([("score_mods", 0), ("indices", 0)], Settings(timeout=1), workers=1)
    # If the alarm rings in C++ code, its exception ends the process.
    found = summary.outcomes[-1]
    assert found.outcome == "crash" and ("no end" in found.reason or "the process ended with -6" in found.reason)


def test_an_interrupted_run_keeps_its_results():
    def interrupt(*_):
        raise KeyboardInterrupt

    summary = run([("casts", seed) for seed in range(100)], Settings(), progress=interrupt)
    assert len(summary.outcomes) == 1 and summary.counts()["casts"]
