"""Proofs about index tensors: those that must be found, those that must not, and no false proof of random arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.gathers.permutations import is_injective, is_permutation, names_once, repeated

N, K = 12, 3


def traced(function, *inputs):
    """The node that a function of index tensors returns, as in the functional graphs of AOTAutograd."""
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
    "randperm_that_is_rounded": lambda e: torch.randperm(300, dtype=torch.bfloat16),
    "remainder_of_nothing": lambda e: e[:0].argsort() % 5,
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
    "remainder": lambda x: x % max(x.numel() // 2, 1),
    "thirds": lambda x: x % max(x.numel() // 3, 1),
    "arange": lambda x: torch.arange(x.numel()),
    "repeat": lambda x: x.repeat(2),
    "repeat_each": lambda x: x.unsqueeze(1).expand(-1, 3).reshape(-1),
    "tile": lambda x: x.unsqueeze(0).expand(2, -1).reshape(-1),
    "permuted": lambda x: x[x.argsort()] if x.numel() else x,
    "shuffled": lambda x: x[(x * 5 + 1).argsort()],
    "nonzero": lambda x: torch.arange(x.numel()).index_select(0, x.argsort()),
}


@pytest.mark.breadth(0)
@settings(max_examples=120, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), st.integers(0, 2**16))
def test_no_false_proof(steps, seed):
    """Every proof about a chain of steps holds for its values."""

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
        rows = values.numel() // proof.times
        assert torch.equal(values.bincount(), torch.full((rows,), proof.times))
        if proof.permutation is None:
            indices = torch.arange(values.numel())
            assert torch.equal(values, indices % rows if proof.strided else indices // proof.times)


def columns(mask):
    return torch.where(mask)


NAMED_ONCE = {
    "both_columns": lambda m: columns(m),
    "both_columns_turned": lambda m: columns(m)[::-1],
    "column_of_a_vector": lambda m: (columns(m[0])[0],),
    "mask": lambda m: (m,),
    "after_a_whole_dim": lambda m: (None, m[0].int().argsort()[:3]),
}
NAMED_TWICE = {
    "one_column": lambda m: (columns(m)[0],),
    "one_column_twice": lambda m: (columns(m)[0], columns(m)[0]),
    "columns_of_two_masks": lambda m: (columns(m)[0], columns(m.T)[0]),
    "crossed": lambda m: (columns(m)[0].unsqueeze(1), columns(m)[1].unsqueeze(0)),
    "two_permutations": lambda m: (m[0].int().argsort(), m[0].int().argsort()),
}


@pytest.mark.parametrize("name", [*NAMED_ONCE, *NAMED_TWICE])
def test_tuples_of_indices(name):
    mask = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
    make = {**NAMED_ONCE, **NAMED_TWICE}[name]
    present = [i is not None for i in make(mask)]
    graph = make_fx(lambda m: [i for i in make(m) if i is not None], tracing_mode="real")(mask).graph
    nodes = iter(graph.find_nodes(op="output")[0].args[0])
    for node in graph.nodes:
        node.meta.setdefault("val", node.meta.get("tensor_meta"))
    indices = tuple(next(nodes) if here else None for here in present)
    assert names_once(indices) == (name in NAMED_ONCE)
