"""One attention in Triton's interpreter against float64, for tests that vary the score_mod."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.support.interpreter import triton_on_cpu

BATCH, HEADS, DIM = 2, 2, 16


def draw(*shape, seed=1):
    """Numbers that are the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(queries, keys=None, kv_heads=HEADS):
    """Query, key and value that need gradients."""
    shapes = (HEADS, queries), (kv_heads, keys or queries), (kv_heads, keys or queries)
    return [draw(BATCH, *shape, DIM, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def assert_matches_float64(
    score_mod, table, lengths, *, mask=None, block_mask=None, kv_heads=HEADS, dynamic=None, compiler=None, **kernel_options
):
    """Assert that the output and the gradients are those of float64.

    score_mod: from a table to a score_mod. lengths: of queries and keys. mask: what hides scores. block_mask: that of the
    attention, if it is not the one of ``mask``. compiler: options of torch.compile.
    """
    inputs = [*heads(*lengths, kv_heads), table.requires_grad_()]
    if block_mask is None and mask is not None:
        block_mask = create_block_mask(mask, None, None, *lengths, device="cpu")
    grad = draw(BATCH, HEADS, lengths[0], DIM, seed=9)

    def attend(q, k, v, t):
        gqa = {"enable_gqa": kv_heads != HEADS, "kernel_options": kernel_options}
        return flex_attention(q, k, v, score_mod=score_mod(t), block_mask=block_mask, **gqa)

    # Lengths that change from one comparison to the next must not become symbols.
    torch._dynamo.reset()
    with triton_on_cpu(tma=True):
        out = torch.compile(attend, backend="gradfuse", fullgraph=True, dynamic=dynamic, options=compiler)(*inputs)
        got = [out, *torch.autograd.grad(out, inputs, grad)]
    want = exact(score_mod, mask, inputs, grad)
    for x, y in zip(got, want, strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()


def exact(score_mod, mask, inputs, grad):
    """Output and gradients in float64."""
    given = [x.detach().double().requires_grad_() for x in inputs]
    query, key, value, table = given
    sizes = (BATCH, HEADS, query.shape[2], key.shape[2])
    b, h, i, j = (torch.arange(n).view([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate(sizes))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
    scores = score_mod(table)(query @ k.mT / DIM**0.5, b, h, i, j)
    if mask is not None:
        scores = scores.masked_fill(~mask(b, h, i, j), -torch.inf)
    out = scores.softmax(-1) @ v
    return [out, *torch.autograd.grad(out, given, grad.double())]
