"""Models of transformers with a scan in training.

Mamba's plain path is ``associative_scan`` under torch.compile, and RecurrentGemma's is a loop over time.
"""

import copy
import importlib

import pytest
import torch

from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.scan.test_compiled import pointwise_scan
from tests.support.eager_graphs import eager_graphs
from tests.support.interpreter import triton_on_cpu

hf = pytest.importorskip("transformers", reason="pip install -e '.[models]'")
LENGTH = 16


def mamba(kind):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 50}
    return getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**sizes, use_associative_scan=True))


def on_a_gpu(combine, xs, dim, combine_mode):
    """associative_scan as for CUDA tensors, for which these models choose the pointwise mode."""
    return pointwise_scan(lambda a, b, c, d: combine((a, b), (c, d)), xs, dim, False)


def step(model, ids):
    hidden = model(ids, use_cache=False)[0]
    tangent = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    hidden.backward(tangent.to(hidden))
    return {"hidden": hidden, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.breadth(0)
@pytest.mark.parametrize("kind", ["Mamba", "FalconMamba"])
def test_gradients(kind, monkeypatch):
    # The name ``associative_scan`` in that package is the function, and the module has the same name.
    module = importlib.import_module("torch._higher_order_ops.associative_scan")
    model, ids = mamba(kind).train(), torch.randint(0, 50, (2, LENGTH))
    want = step(copy.deepcopy(model).double(), ids)
    monkeypatch.setattr(module, "associative_scan", on_a_gpu)
    with eager_graphs(), collect() as report:
        got = step(torch.compile(model, backend="gradfuse"), ids)
    assert [d.path for d in report.decisions if d.pass_name == "scans" and d.path == "scan"] == ["scan"] * 2
    got = {name.removeprefix("_orig_mod."): x for name, x in got.items()}
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (x is None) == (got[name] is None) and (x is None or relative_error(got[name], x) < 1e-5), name


@pytest.mark.breadth(0)
def test_recurrent_gemma():
    sizes = {"hidden_size": 16, "lru_width": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
    model = hf.RecurrentGemmaModel(hf.RecurrentGemmaConfig(**sizes, num_hidden_layers=3, vocab_size=50)).train()
    ids = torch.randint(0, 50, (2, LENGTH))
    want = step(copy.deepcopy(model).double(), ids)
    # The graphs run eagerly. But on a CPU without Triton the loop would stay.
    with triton_on_cpu(), eager_graphs(), collect() as report:
        got = step(torch.compile(model, backend="gradfuse"), ids)
    assert [d.path for d in report.decisions if d.pass_name == "time_loops"] == ["scan"] * 2
    for name, x in want.items():
        assert relative_error(got[name if name == "hidden" else f"_orig_mod.{name}"], x) < 1e-5, name
