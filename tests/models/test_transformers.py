"""Models of transformers, not one line of which is changed: which attentions are replaced, and every gradient."""

import contextlib
import copy

import pytest
import torch

from inductor_ext.attention.recognition import grouped, rewrite
from inductor_ext.casts import linears
from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.support.eager_graphs import eager_graphs
from tests.support.targets import on_target

pytest.importorskip("transformers", reason="pip install -e '.[models]'")
from .zoo import MODELS, ORDINARY, encoder_and_decoder, t5

#: Gradients of this many inputs are compared as one. The gradients of Swin V2's scales and network of positions are sums that
#: cancel: for one input, the error of eager mode too is up to 1.6e-5.
DRAWS = 4


def step(model, inputs):
    """The last hidden state and the gradient of every parameter that has one."""
    model.zero_grad()
    out = model(**inputs)
    hidden = out[0]
    tangent = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    hidden.backward(tangent.to(hidden))
    return {"hidden": hidden, **{name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}}


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
    exact, compiled = copy.deepcopy(model).double(), torch.compile(model, backend="gradfuse")
    got, want = [], []
    # Inductor's C++ would take most of the time, and none of it is ours.
    with eager_graphs() if device == "cpu" else contextlib.nullcontext(), collect() as report:
        for _ in range(DRAWS):
            inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in case.inputs().items()}
            got.append(step(compiled, inputs))
            want.append(step(exact, widened(inputs)))
    found = [d.path for d in report.decisions if d.pass_name == "attention_pattern"]
    # Releases of transformers with a graph break between layers compile the code of a layer once.
    assert set(found) == {"flex_attention"} and len(found) in (1, case.attentions)
    assert got[0].keys() == want[0].keys()
    for parameter in want[0]:
        mine, exactly = ([run[parameter] for run in runs] for runs in (got, want))
        without = [x is None for x in exactly]
        assert [x is None for x in mine] == without and len(set(without)) == 1, parameter
        # A gradient that is zero in exact arithmetic (a key's bias, which softmax cancels) has rounding errors only.
        if not without[0] and torch.stack(exactly).norm() > 1e-9:
            assert relative_error(torch.stack(mine), torch.stack(exactly)) < 1e-5, parameter


@pytest.mark.breadth(0)
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_attention_stays_as_it_is(name):
    """And what has no gradient in eager mode gets none."""
    torch.manual_seed(0)
    case = ORDINARY[name]
    model, inputs = case.build().train(), case.inputs()
    want = step(copy.deepcopy(model).double(), widened(inputs))
    with eager_graphs(), collect() as report:
        got = step(torch.compile(model, backend="gradfuse"), inputs)
    assert not [d for d in report.decisions if d.pass_name == "attention_pattern"]
    for parameter, exact in want.items():
        assert (got[parameter] is None) == (exact is None), parameter
        if exact is not None and exact.norm() > 1e-9:
            assert relative_error(got[parameter], exact) < 1e-5, parameter


@pytest.mark.breadth(0)
def test_t5_in_checkpoints():
    """The decoder's layers without a table get their bias from the first one, as an input of a checkpoint."""
    torch.manual_seed(0)
    model, inputs = t5("sdpa").train(), encoder_and_decoder()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    want = step(copy.deepcopy(model).double(), inputs)
    with eager_graphs(), collect() as report:
        got = step(torch.compile(model, backend="gradfuse"), inputs)
    assert [d.path for d in report.decisions if d.pass_name == "attention_pattern"] == ["flex_attention"] * 4
    for parameter, exact in want.items():
        if exact is not None and exact.norm() > 1e-9:
            assert relative_error(got[parameter], exact) < 1e-5, parameter


#: On a GPU, the models in whose benchmarks a goal is set.
UNDER_AUTOCAST = [(name, "cpu") for name in MODELS]
UNDER_AUTOCAST += [
    pytest.param(n, "cuda", marks=pytest.mark.gpu) for n in MODELS if n.startswith(("t5", "swin", "beit", "deb"))
]


@pytest.mark.breadth(0)
@pytest.mark.parametrize(("name", "device"), UNDER_AUTOCAST)
def test_under_autocast(name, device):
    """Layers of one input become one on a GPU. Gradients are as exact as in eager mode, all of them together."""
    torch.manual_seed(0)
    case, cpu = MODELS[name], device == "cpu"
    model = case.build().train().to(device)
    inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in case.inputs().items()}
    exact = step(copy.deepcopy(model).double(), widened(inputs))
    eager = copy.deepcopy(model)
    with torch.autocast(device, torch.bfloat16):
        theirs = step(eager, inputs)
        with contextlib.ExitStack() as stack:
            if cpu:
                stack.enter_context(on_target(triton=True))
                stack.enter_context(eager_graphs())
            report = stack.enter_context(collect())
            ours = step(torch.compile(model, backend="gradfuse"), inputs)
    assert {d.path for d in report.decisions if d.pass_name == "attention_pattern"} == {"flex_attention"}
    layers = [d.why for d in report.decisions if d.pass_name == linears.NAME]
    # SAM and ViTDet have one layer for query, key and value. The biases of WavLM's layers are parts of a tensor.
    assert (layers == []) == (name in ("sam", "vitdet", "wavlm"))
    known = [key for key, x in exact.items() if x is not None and x.norm() > 1e-9]
    error = [torch.tensor([relative_error(found[key], exact[key]) for key in known]).norm() for found in (ours, theirs)]
    assert error[0] <= 1.2 * error[1]


@pytest.mark.breadth(0)
def test_t5_trains_with_its_default_dropout():
    """Gradients are finite, two steps differ, and a seed reproduces them."""
    model = t5("sdpa", dropout=0.1).train()
    compiled, inputs = torch.compile(model, backend="gradfuse"), encoder_and_decoder()

    def run():
        return step(compiled, inputs)

    with collect() as report:
        torch.manual_seed(3)
        first, second = run()["hidden"], run()["hidden"]
    assert sum(d.pass_name == "attention_dropout" for d in report.decisions) == 4
    torch.manual_seed(3)
    again = run()
    assert torch.equal(first, again["hidden"]) and not torch.equal(first, second)
    assert all(x is None or torch.isfinite(x).all() for x in again.values())
