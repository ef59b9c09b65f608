"""What a loop over time computes of its states, by ops of each kind, is computed for all times at once."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from inductor_ext.core.report import collect
from inductor_ext.torch_api.higher_order import associative_scan_hop
from tests.support.interpreter import DEVICES, triton_on_cpu

from .test_loops import compiled, operands, relative_error, results_and_gradients

#: Of a state h [B, D], an element c [B, D] of another sequence, and w [D, D], which is the same at all times.
AT_ONCE = {
    "unsqueeze": lambda h, c, w: h.unsqueeze(1) * c.unsqueeze(-1),
    "unsqueeze_of_the_last": lambda h, c, w: torch.unsqueeze(h, -1) + w,
    "squeeze": lambda h, c, w: h[:, None].squeeze(1) - h[..., None].squeeze(-1) * c,
    "select": lambda h, c, w: h.select(1, 2) * torch.select(h, -1, 0),
    "index": lambda h, c, w: h[:, 1, None] * h[..., 2:] + h[:, :3] * c[:, :1],
    "sum": lambda h, c, w: (h * c).sum(1, keepdim=True) * torch.sum(h, dim=(0, 1)),
    "mean": lambda h, c, w: h.mean(-1) + (h * c).mean([0, 1], dtype=torch.float64).to(h.dtype),
    "matmul_of_a_matrix": lambda h, c, w: h @ w + torch.matmul(w, h.unsqueeze(-1)).squeeze(-1),
    "matmul_of_elements": lambda h, c, w: torch.bmm(h.unsqueeze(1), c.unsqueeze(2)) @ c.unsqueeze(1),
    "matmul_of_other_ranks": lambda h, c, w: h.unsqueeze(1).unsqueeze(1) @ c[:1].unsqueeze(-1),
    "matmul_of_states": lambda h, c, w: h.unsqueeze(2) @ h.unsqueeze(1),
    "linear": lambda h, c, w: torch.nn.functional.linear(h, w, w.mean(0)),
    "einsum": lambda h, c, w: torch.einsum("bd, be -> bde", h, c),
    "einsum_of_a_matrix": lambda h, c, w: torch.einsum("td,be,de->tb", [h, c, w]),
}
#: What is not computed for all times at once.
ONE_BY_ONE = {
    "squeeze_of_all": lambda h, c, w: h[:, None].squeeze(),
    "sum_of_all": lambda h, c, w: (h * c).sum(),
    "transpose": lambda h, c, w: h.transpose(0, 1),
    "einsum_without_a_result": lambda h, c, w: torch.einsum("bd,be", h, c),
    "einsum_with_an_ellipsis": lambda h, c, w: torch.einsum("...d,...d->...", h, c),
    "matmul_of_matrices": lambda h, c, w: h[:, None] @ torch.stack([w, w * 2]),
    "matmul_of_a_vector": lambda h, c, w: h @ w[0],
    "index_by_a_tensor": lambda h, c, w: h[:, w.argmax(1)],
    "linear_of_an_element": lambda h, c, w: torch.nn.functional.linear(w, c, h[0, :2]),
}


def loop(read):
    def function(a, x, h):
        w, outs = torch.cos(a[0].mT @ x[1]), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            outs.append(read(h, a[:, t], w))
        return torch.stack(outs)

    return function


@pytest.mark.breadth(4)
@pytest.mark.parametrize("name", AT_ONCE)
def test_of_all_times_at_once(name):
    tensors = operands(length=8)
    (results, grads), decisions = compiled(loop(AT_ONCE[name]), tensors, "cpu")
    assert [d.path for d in decisions] == ["scan"]
    want_results, want_grads = results_and_gradients(loop(AT_ONCE[name]), [t.double() for t in tensors])
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert got.shape == want.shape and relative_error(got, want) < 1e-6


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_by_one(name):
    tensors = operands(length=8)
    (results, grads), decisions = compiled(loop(ONE_BY_ONE[name]), tensors, "cpu")
    assert [(d.path, d.why) for d in decisions] == [("stock", "8 of its states are used one by one")]
    want_results, want_grads = results_and_gradients(loop(ONE_BY_ONE[name]), [t.double() for t in tensors])
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert got.shape == want.shape and relative_error(got, want) < 1e-6


def numbers_of_a_time(a, x, h):
    """The states have no dim."""
    a, x, h, outs = a[0, :, 0], x[0, :, 0], h[0, 0], []
    for t in range(x.shape[0]):
        h = a[t] * h + x[t]
        outs.append(h.mean(-1) + h[None].sum(0))
    return torch.stack(outs) * x


def numbers_of_several_dims(a, x, h):
    a, x, h, outs = a[0], x[0], h[0], []
    for t in range(x.shape[0]):
        h = a[t] * h + x[t]
        outs.append((h * x[t]).sum(-1).squeeze(0).sum((0,)))
    return torch.stack(outs) * a[:, 0]


def numbers_of_another_integer_dtype(a, x, h):
    """In eager mode int8 + a number of int32 is int8, and wraps."""
    counts, outs = torch.arange(x.shape[1], dtype=torch.int32, device=x.device) * 60, []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(((h * 8).to(torch.int8) + counts[t]).float() * h)
    return torch.stack(outs, 1)


def numbers_of_another_floating_dtype(a, x, h):
    w, scale, outs = torch.cos(a.mean(1).mT @ x.mean(1)), torch.linspace(0.5, 1, x.shape[1], dtype=torch.float64), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(torch.nn.functional.linear(h * scale[t].to(h.device), w.to(h.dtype)))
    return torch.stack(outs, 1)


def linear_of_itself(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(torch.nn.functional.linear(h, h))
    return torch.stack(outs, 1)


def complex_in_between(a, x, h):
    c, outs = torch.complex(a, a * 2), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append((h.to(c.dtype) * c[:, t]).sum(1))
    return torch.view_as_real(torch.stack(outs))


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "function",
    [
        numbers_of_a_time,
        numbers_of_several_dims,
        numbers_of_another_integer_dtype,
        numbers_of_another_floating_dtype,
        linear_of_itself,
        complex_in_between,
    ],
)
def test_programs_that_went_wrong(function):
    tensors = operands(length=9)
    (results, grads), decisions = compiled(function, tensors, "cpu")
    assert len(decisions) == 1
    want_results, want_grads = results_and_gradients(function, [t.double() for t in tensors])
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert got.shape == want.shape and relative_error(got, want) < 1e-5


@pytest.mark.breadth(1)
@pytest.mark.parametrize("read", ["stack", "last state"])
def test_views_of_what_is_replaced(read):
    """A later pass must see that the caller can change them, and not keep them for the backward."""

    def function(a, x, h):
        outs = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            outs.append(h)
        y, u = (torch.stack(outs), x.transpose(0, 1)) if read == "stack" else (h, x[:, 0])
        scanned = associative_scan_hop(lambda a, b, c, d: [a * c, b * c + d], [y.flip([0]), u.flip([0])], ())
        return scanned[1].flip([0]).sin(), y[:, 1:], torch.stack(outs, 1).sum(1)

    grads = []
    for change in (False, True):
        tensors = [t.requires_grad_() for t in operands(length=9)]
        torch._dynamo.reset()
        with triton_on_cpu():
            first, view, _ = torch.compile(function, backend="gradfuse", fullgraph=True)(*tensors)
            if change:
                with torch.no_grad():
                    view.zero_()
            grads.append(torch.autograd.grad(first.sum(), tensors))
    assert all(torch.equal(changed, kept) for kept, changed in zip(*grads, strict=True))


class Flattened(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.view(2, -1, 5)


#: Views of the states that graphs of their own return.
VIEWS = {
    "checkpoint": lambda y, h: checkpoint(lambda y, h: (y[:, 1:], h[0]), y, h, use_reentrant=False),
    "autograd function": lambda y, h: (Flattened.apply(y), h.view(-1)),
    "region of autocast": lambda y, h: (autocast_off(lambda: y.transpose(0, 1)), h),
}


def autocast_off(function):
    with torch.autocast("cpu", enabled=False):
        return function()


@pytest.mark.parametrize("view", VIEWS)
def test_views_in_graphs_of_their_own(view):
    def function(a, x, h):
        outs = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            outs.append(h)
        ys, last = VIEWS[view](torch.stack(outs, 1), h)
        return ys * 2, last.sin()

    tensors = operands(length=9)
    (results, grads), decisions = compiled(function, tensors, "cpu")
    assert [d.path for d in decisions] == ["scan"]
    want_results, want_grads = results_and_gradients(function, [t.double() for t in tensors])
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert got.shape == want.shape and relative_error(got, want) < 1e-6


def test_an_operand_of_another_time():
    def function(a, x, h):
        outs = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            outs.append(torch.einsum("bd,bd->b", h, a[:, t - 1]))
        return torch.stack(outs)

    tensors = operands(length=8)
    (results, _), decisions = compiled(function, tensors, "cpu")
    assert [d.path for d in decisions] == ["stock"]
    assert relative_error(results[0], function(*[t.double() for t in tensors])) < 1e-6


@pytest.mark.breadth(1)
@pytest.mark.parametrize(("gradient", "path"), [(True, "scan"), (False, "stock")])
def test_memory_that_only_the_scan_needs(gradient, path):
    """The states of linear attention are D times larger than what they are computed from, and only a gradient needs them all."""

    def function(a, x, h):
        state, outs = h[..., None] * h[:, None], []
        for t in range(x.shape[1]):
            state = 0.9 * state + a[:, t, :, None] * x[:, t, None]
            outs.append((state @ x[:, t, :, None]).squeeze(-1))
        return torch.stack(outs, 1)

    tensors = [torch.randn(2, 8, 64, requires_grad=gradient) for _ in range(2)] + [torch.randn(2, 64)]
    torch._dynamo.reset()
    with collect() as report, triton_on_cpu():
        result = torch.compile(function, backend="gradfuse", fullgraph=True)(*tensors)
    assert [d.path for d in report.decisions if d.pass_name == "time_loops"] == [path]
    assert relative_error(result.detach(), function(*[t.detach().double() for t in tensors])) < 1e-6


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exporting", [True, False])
def test_transformers_mamba(device, exporting, monkeypatch):
    """If it believes that it is exported, as with torch 2.11, it has a loop; if not, associative_scan, but not on a CPU."""
    pytest.importorskip("transformers")
    if device == "interpreter" and not exporting:
        pytest.skip("on a CPU it has neither")
    from transformers import MambaConfig, MambaModel
    from transformers.models.mamba import modeling_mamba

    monkeypatch.setattr(modeling_mamba, "is_torchdynamo_exporting", lambda: exporting)
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=10, state_size=4)
    mixer, x = MambaModel(config).layers[0].mixer.train(), torch.randn(2, 12, 16)

    def results(run, x):
        mixer.zero_grad()
        y = run(x)
        y.square().mean().backward()
        return [y.detach().cpu(), *(p.grad.cpu() for p in mixer.parameters())]

    torch._dynamo.reset()
    mixer.to(device if device == "cuda" else "cpu")
    with collect() as report, triton_on_cpu() if device == "interpreter" else contextlib.nullcontext():
        found = results(torch.compile(mixer, backend="gradfuse"), x.to(next(mixer.parameters()).device))
    paths = {d.path for d in report.decisions if d.pass_name == ("time_loops" if exporting else "scans")}
    assert paths and "stock" not in paths
    exact = results(mixer.double().cpu(), x.double())
    assert max(relative_error(got, want) for got, want in zip(found, exact, strict=True)) < (
        2e-6 if device == "cuda" else 1e-6
    )
