"""Models of transformers, not one line of which is changed: which attentions are replaced, and every gradient."""

import copy

import pytest
import torch

from inductor_ext.attention.recognition import grouped, rewrite
from inductor_ext.core.report import collect
from tests.attention.case import SLACK, relative_error

pytest.importorskip("transformers", reason="pip install -e '.[models]'")
from .zoo import MODELS, encoder_and_decoder, t5


def step(model, inputs):
    """The last hidden state and the gradient of every parameter that has one."""
    out = model(**inputs)
    hidden = out[0]
    tangent = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    hidden.backward(tangent.to(hidden))
    return {"hidden": hidden, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.fixture(autouse=True)
def few_scores_are_enough(monkeypatch):
    monkeypatch.setattr(rewrite, "FEWEST_ON_CPU", 0)
    monkeypatch.setattr(grouped, "FEWEST_KEYS", 0)


@pytest.fixture(autouse=True)
def convolutions_in_fp32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def widened(inputs):
    return {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name, device):
    case = MODELS[name]
    model = case.build().train().to(device)
    inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in case.inputs().items()}
    exact, eager = copy.deepcopy(model).double(), step(copy.deepcopy(model), inputs)
    with collect() as report:
        got = step(torch.compile(model, backend="gradfuse"), inputs)
    found = [d.path for d in report.decisions if d.pass_name == "attention_pattern"]
    # Releases of transformers with a graph break between layers compile the code of a layer once.
    assert set(found) == {"flex_attention"} and len(found) in (1, case.attentions)
    want = step(exact, widened(inputs))
    got = {name.removeprefix("_orig_mod."): x for name, x in got.items()}
    assert got.keys() == want.keys()
    # A parameter whose gradient is zero in exact arithmetic (a key's bias, which softmax cancels) has rounding errors only.
    some = {parameter: x for parameter, x in want.items() if x is not None and x.norm() > 1e-9}
    # The gradients of Swin V2's network of positions cancel: eager mode's own error is up to 1.6e-5 for some.
    allowed = max(1e-5, SLACK * max(relative_error(eager[parameter], x) for parameter, x in some.items()))
    for parameter, x in want.items():
        assert (x is None) == (got[parameter] is None), parameter
        error = relative_error(got[parameter], x) if parameter in some else 0.0
        assert error < allowed, (parameter, error, allowed)


@pytest.mark.breadth(0)
def test_t5_trains_with_its_default_dropout():
    """Gradients are finite, two steps differ, and a seed reproduces them."""
    model = t5("sdpa", dropout=0.1).train()
    compiled, inputs = torch.compile(model, backend="gradfuse"), encoder_and_decoder()

    def run():
        model.zero_grad()
        return step(compiled, inputs)

    with collect() as report:
        torch.manual_seed(3)
        first, second = run()["hidden"], run()["hidden"]
    assert sum(d.pass_name == "attention_dropout" for d in report.decisions) == 4
    torch.manual_seed(3)
    again = run()
    assert torch.equal(first, again["hidden"]) and not torch.equal(first, second)
    assert all(x is None or torch.isfinite(x).all() for x in again.values())
