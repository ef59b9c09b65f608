"""Proofs about index tensors: what is recognised, what must not be, and no false proof of random index arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.analysis.permutations import is_injective, is_permutation, repeated

N, K = 12, 3


def traced(function, *inputs):
    """The node that a function of index tensors returns, as it stands in AOTAutograd's functional graphs."""
    graph = make_fx(functionalize(function, remove="mutations"), tracing_mode="fake")(*inputs).graph
    return graph.find_nodes(op="output")[0].args[0]


def inverse(p):
    made = torch.empty_like(p)
    made[p] = torch.arange(p.numel())
    return made


def overwritten(p):
    p = p.clone()
    p[2:5] = p[0]
    return p


PERMUTATIONS = {
    "argsort": lambda e: e.argsort(),
    "stable": lambda e: e.argsort(stable=True, descending=True),
    "sort": lambda e: e.sort().indices,
    "randperm": lambda e: torch.randperm(N),
    "arange": lambda e: torch.arange(N),
    "flip": lambda e: e.argsort().flip(0),
    "int32": lambda e: e.argsort().int(),
    "int8": lambda e: e.argsort().to(torch.int8),
    "inverse": lambda e: inverse(e.argsort()),
    "double": lambda e: e.argsort().argsort(),
    "composed": lambda e: e.argsort()[(e * 7).argsort()],
    "reshaped": lambda e: e.argsort().view(4, 3).reshape(-1).contiguous(),
    "column": lambda e: e.view(N, 1).argsort(0),
}
NOTHING = {
    "itself": lambda e: e,
    "shifted": lambda e: e.argsort() + 1,
    "by_rows": lambda e: e.view(4, 3).argsort(-1).view(-1),
    "along_a_dim_of_one": lambda e: e.view(N, 1).argsort(1),
    "overwritten": lambda e: overwritten(e.argsort()),
    "modulo": lambda e: e.argsort() % 5,
    "float": lambda e: (e.argsort().float() / 2).long(),
    "mask_of_bytes": lambda e: e.argsort().to(torch.uint8),
    "bool": lambda e: e.argsort().bool(),
    "table": lambda e: e[e.argsort()],
    "ceil": lambda e: torch.div(e.argsort(), 2, rounding_mode=None).long(),
    "values": lambda e: e.sort().values,
}


@pytest.fixture
def experts():
    return torch.randint(0, 4, (N,))


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_permutations(name, experts):
    node = traced(PERMUTATIONS[name], experts)
    assert is_permutation(node) and is_injective(node)
    assert repeated(node).times == 1


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_is_claimed(name, experts):
    node = traced(NOTHING[name], experts)
    assert not is_permutation(node) and not is_injective(node) and repeated(node) is None


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_repeated(name, experts):
    proof = repeated(traced(lambda e: PERMUTATIONS[name](e) // K, experts))
    assert (proof.length, proof.times) == (N, K)


def test_parts_have_no_duplicates(experts):
    part = traced(lambda e: e.argsort()[2:7], experts)
    assert is_injective(part) and not is_permutation(part)
    assert is_injective(traced(lambda e: e.argsort()[e.argsort()[:5]], experts))
    assert is_injective(traced(lambda e: e.float().topk(5).indices, experts))
    assert not is_injective(traced(lambda e: e.view(4, 3).float().topk(2).indices, experts))


def test_an_inverse_that_is_not_whole_is_none(experts):
    def half(e):
        made = torch.zeros(N, dtype=torch.int64)
        made[e.argsort()[:6]] = torch.arange(6)
        return made

    assert not is_permutation(traced(half, experts))


STEPS = {
    "argsort": lambda x: x.argsort(),
    "sort": lambda x: x.sort().indices,
    "flip": lambda x: x.flip(0),
    "half": lambda x: x[: (x.numel() + 1) // 2],
    "divide": lambda x: x // 2,
    "modulo": lambda x: x % 4,
    "add": lambda x: x + 1,
    "int8": lambda x: x.to(torch.int8).long(),
    "self": lambda x: x[x.argsort()],
    "rows": lambda x: x.view(2, -1).argsort(-1).reshape(-1) if x.numel() % 2 == 0 else x,
    "column": lambda x: x.view(-1, 1).argsort(1).view(-1),
    "overwrite": overwritten,
    "inverse_of_sort": lambda x: inverse(x.argsort()),
    "topk": lambda x: x.topk((x.numel() + 1) // 2).indices,
    "cat": lambda x: torch.cat([x, x]),
    "roll": lambda x: x.roll(1),
    "view": lambda x: x.view(-1, 1).squeeze(1),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), st.integers(0, 2**16))
def test_no_false_proof(steps, seed):
    """Whatever is claimed of a chain of steps holds for its values."""

    def chain(x):
        for step in steps:
            x = STEPS[step](x)
        return x

    start = torch.randint(0, 300, (N,), generator=torch.Generator().manual_seed(seed))
    node, values = traced(chain, start), chain(start).flatten()
    if is_permutation(node):
        assert torch.equal(values.sort().values, torch.arange(values.numel()))
    if is_injective(node):
        assert values.unique().numel() == values.numel()
    proof = repeated(node)
    if proof is not None and values.numel() % proof.times == 0:
        assert torch.equal(values.bincount(), torch.full((values.numel() // proof.times,), proof.times))
