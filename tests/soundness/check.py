"""Compare what gradfuse makes of a function with the function itself, run eagerly: values, gradients, mutations."""

import copy

import torch
from torch.utils import _pytree as pytree

from tests.attention.case import relative_error
from tests.support.eager_graphs import eager_graphs


def run(function, inputs, grads_of=None):
    """The results of ``function(*inputs)`` and the gradients of every floating input that needs one."""
    out = function(*inputs)
    results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
    leaves = [x for x in (inputs if grads_of is None else grads_of) if isinstance(x, torch.Tensor) and x.requires_grad]
    needed = [x for x in results if x.requires_grad]
    if not needed or not leaves:
        return results, []
    generator = torch.Generator().manual_seed(7)
    tangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in needed]
    return results, list(torch.autograd.grad(needed, leaves, tangents, allow_unused=True))


def _widened(x):
    return x.detach().double().requires_grad_(x.requires_grad) if torch.is_tensor(x) and x.is_floating_point() else x


def check_matches_eager(function, *inputs, tolerance=1e-5, options=None, dynamic=None, exact=False):
    """Assert that the rewritten graphs of ``function``, run op by op, compute what it computes eagerly.

    exact: eagerly on float64 inputs; dtypes are not compared then.
    """
    expected_inputs, given_inputs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    expected_inputs = tuple(map(_widened, expected_inputs)) if exact else expected_inputs
    want, want_grads = run(function, expected_inputs)
    torch._dynamo.reset()
    with eager_graphs():
        compiled = torch.compile(function, backend="gradfuse", fullgraph=True, options=options, dynamic=dynamic)
        got, got_grads = run(compiled, given_inputs)
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip([*got, *got_grads, *given_inputs], [*want, *want_grads, *expected_inputs], strict=True)):
        if g is None or w is None:
            assert g is w, (i, g, w)
        elif isinstance(w, torch.Tensor):
            assert g.shape == w.shape and (exact or g.dtype == w.dtype), (i, g.shape, w.shape, g.dtype, w.dtype)
            assert relative_error(g, w) <= tolerance, (i, relative_error(g, w))
