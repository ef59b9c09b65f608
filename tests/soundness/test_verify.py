"""``verify`` finds a pass that computes wrong results and accepts the others; ``dump`` shows what each pass did."""

import re
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import inductor_ext
from inductor_ext import passes
from inductor_ext.core.report import collect
from inductor_ext.verify import VerificationError
from tests.support.eager_graphs import eager_graphs


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)
        self.scale = torch.nn.Parameter(torch.rand(2))
        self.bias = torch.nn.Parameter(torch.randn(2, 63))
        self.mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, device="cpu")

    def forward(self, x, key):
        x = x[:, key.argsort()]
        q, k, v = self.project(x).view(2, 32, 3, 1, 16).expand(-1, -1, -1, 2, -1).permute(2, 0, 3, 1, 4)
        scale, bias = self.scale, self.bias
        mod = lambda s, b, h, q, k: s * scale[h] + bias[h, q - k + 31]  # noqa: E731
        return flex_attention(q, k, v, score_mod=mod, block_mask=self.mask)


def step(options, function=None):
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(function or model, backend="gradfuse", options=options)
    with eager_graphs(), collect() as report:
        compiled(torch.randn(2, 32, 16), torch.randn(32)).sum().backward()
    return report


def test_a_model_that_is_right_passes():
    (found,) = [d for d in step({"verify": True}).decisions if d.pass_name == "verify"]
    assert found.path == "checked"


@pytest.mark.breadth(0)
def test_a_wrong_pass_is_found_and_named():
    rewrite = passes.hoisting.rewrite

    def wrong(gm, options):
        rewrite(gm, options)
        for node in gm.graph.find_nodes(op="call_method", target="contiguous"):
            with gm.graph.inserting_after(node):
                doubled = gm.graph.call_function(torch.mul, (node, 2.0))
            node.replace_all_uses_with(doubled, delete_user_cb=lambda user, new=doubled: user is not new)
        gm.recompile()

    def only_if_enabled(gm, options):
        if options.enabled("hoisting"):
            wrong(gm, options)

    with mock.patch.object(passes.hoisting, "rewrite", only_if_enabled), pytest.raises(Exception) as caught:
        step({"verify": True})
    text = str(caught.value)
    assert (
        VerificationError.__name__ in repr(caught.value.__cause__ or caught.value) or "other results than your model" in text
    )
    assert "'hoisting'" in text and "relative error" in text and "No single pass" not in text


def test_a_model_with_dropout_is_compared_with_the_same_random_numbers():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    with eager_graphs(), collect() as report:
        torch.compile(model, backend="gradfuse", options={"verify": True})(torch.randn(64, 8)).sum().backward()
    assert [d.path for d in report.decisions if d.pass_name == "verify"] == ["checked"]


def test_a_scan_and_a_checkpoint_are_verified():
    scan = torch._higher_order_ops.associative_scan

    def body(g, x):
        return scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (g, x), 0, combine_mode="generic")[1]

    def function(g, x):
        return torch.utils.checkpoint.checkpoint(body, torch.sigmoid(g), x, use_reentrant=False)

    g, x = (torch.randn(9, 3, requires_grad=True) for _ in range(2))
    with eager_graphs(), collect() as report:
        torch.compile(function, backend="gradfuse", options={"verify": True})(g, x).sum().backward()
    assert [d.path for d in report.decisions if d.pass_name == "verify"] == ["checked"]


def test_verification_does_not_touch_the_callers_tensors():
    buffer, x = torch.zeros(4), torch.randn(4, requires_grad=True)

    def function(x):
        buffer.add_(1)
        return x * buffer

    with eager_graphs():
        out = torch.compile(function, backend="gradfuse", options={"verify": True})(x)
    out.sum().backward()
    assert torch.equal(buffer, torch.ones(4)) and torch.equal(x.grad, torch.ones(4))


@pytest.mark.breadth(0)
def test_dump_writes_graphs_before_and_after_each_pass_and_the_code(tmp_path):
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend="gradfuse", options={"dump": str(tmp_path)})
    compiled(torch.randn(2, 32, 16, requires_grad=True), torch.randn(32)).sum().backward()
    (folder,) = tmp_path.iterdir()
    names = [re.sub(r"^\d+_", "", p.name) for p in sorted(folder.iterdir())]
    assert {"dynamo.py", "dynamo_hoisting.py", "joint.py", "joint_scatters.py"} <= set(names)
    assert {"code_forward.py", "code_backward.py"} <= set(names)
    hoisted = next(p for p in folder.iterdir() if p.name.endswith("dynamo_hoisting.py")).read_text()
    assert "torch.broadcast_to" in hoisted and "class" in hoisted


def test_options_of_the_environment(monkeypatch):
    monkeypatch.setenv("GRADFUSE_DISABLE", "hoisting,casts")
    assert {"hoisting", "casts"} <= inductor_ext.options.split({"disable": ["scans"]})[0].disable
    monkeypatch.setenv("GRADFUSE_DISABLE", "hosting")
    with pytest.raises(inductor_ext.OptionError, match="hoisting"):
        inductor_ext.options.split({})
