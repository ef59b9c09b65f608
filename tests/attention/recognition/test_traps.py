"""What only looks like attention with a learned bias is left alone, with a reason; and what is not worth it, without one."""

import pytest
import torch
import torch.nn.functional as F

from inductor_ext.attention.recognition import rewrite as rewrite_module
from inductor_ext.attention.recognition.pattern import has_no_effect
from inductor_ext.core.fx import fake_tensor
from inductor_ext.core.report import collect
from inductor_ext.options import Options
from inductor_ext.passes import ORDER
from inductor_ext.torch_api.higher_order import flex_attention_hop
from tests.soundness.check import check_matches_eager
from tests.support.eager_graphs import eager_graphs

from .spellings import LOWEST, B, D, H, S


def randn(*shape, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), requires_grad=grad)


def decisions(function, *inputs, exact=True, **options):
    """Compare with eager code, in float64 if ``exact``, and return what the pass decided."""
    with collect() as report:
        check_matches_eager(function, *inputs, exact=exact, **options)
    return [d for d in report.decisions if d.pass_name == "attention_pattern"]


def tensors(grad=True):
    return [randn(B, H, S, D, grad=grad) for _ in range(3)]


def probabilities_are_returned(q, k, v, bias):
    p = (q @ k.mT + bias).softmax(-1)
    return p @ v, p


def probabilities_change_in_place(q, k, v, bias):
    p = (q @ k.mT + bias).softmax(-1) * 1.0
    p *= 0.5
    return p @ v


def a_mask_after_the_softmax(q, k, v, bias):
    p = (q @ k.mT + bias).softmax(-1)
    return p.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), 0.0) @ v


def softmax_over_queries(q, k, v, bias):
    return (q @ k.mT + bias).softmax(-2) @ v


def softmax_over_heads(q, k, v, bias):
    return (q @ k.mT + bias).softmax(1) @ v


def a_bias_of_the_scores(q, k, v, bias):
    scores = q @ k.mT
    return (scores + bias * scores.amax(-1, keepdim=True)).softmax(-1) @ v


def dropout_on_scores(q, k, v, bias):
    return F.dropout(q @ k.mT + bias, 0.0).softmax(-1) @ v


def two_sinks(q, k, v, bias):
    scores = torch.cat([q @ k.mT + bias, bias[..., :2].expand(B, -1, -1, -1)], -1)
    return scores.softmax(-1)[..., :-2] @ v


def a_sink_between_keys(q, k, v, bias):
    scores = q @ k.mT + bias
    logits = torch.cat([scores[..., :1], bias[..., :1].expand(B, -1, -1, -1), scores[..., 1:]], -1)
    return logits.softmax(-1)[..., 1:] @ v


def the_first_key_is_dropped(q, k, v, bias):
    scores = q @ k.mT + bias
    return torch.cat([scores, bias[..., :1].expand(B, -1, -1, -1)], -1).softmax(-1)[..., 1:] @ v


def a_sink_of_the_scores(q, k, v, bias):
    scores = q @ k.mT + bias
    return torch.cat([scores, scores[..., :1]], -1).softmax(-1)[..., :-1] @ v


def a_sink_with_a_value(q, k, v, bias):
    scores = torch.cat([(q @ k.mT + bias)[..., 1:], bias[..., :1].expand(B, -1, -1, -1)], -1)
    return scores.softmax(-1) @ v


def an_assertion_about_probabilities(q, k, v, bias):
    probabilities = (q @ k.mT + bias).softmax(-1)
    torch._assert_async((probabilities >= 0).all())
    return probabilities @ v


def talking_heads(q, k, v, bias):
    scores = torch.einsum("hg,bgqk->bhqk", bias[0, :, :H, 0], q @ k.mT + bias)
    return scores.softmax(-1) @ v


def a_bias_that_is_not_read(q, k, v, bias):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.baddbmm(bias.expand(B, -1, -1, -1).flatten(0, 1), q, k.mT, beta=0).softmax(-1) @ v


LOOKALIKES = {
    a_bias_that_is_not_read: None,
    probabilities_are_returned: "also used",
    probabilities_change_in_place: None,
    an_assertion_about_probabilities: "also used",
    a_mask_after_the_softmax: None,
    softmax_over_queries: "not over the keys",
    softmax_over_heads: "not over the keys",
    a_bias_of_the_scores: "also used",
    two_sinks: "over other keys",
    a_sink_between_keys: "over other keys",
    the_first_key_is_dropped: "over other keys",
    a_sink_of_the_scores: "also used",
    a_sink_with_a_value: None,
    talking_heads: None,
}


@pytest.mark.breadth(5)
@pytest.mark.parametrize("function", LOOKALIKES, ids=lambda f: f.__name__)
def test_lookalikes_are_left_alone(function):
    found = decisions(function, *tensors(), randn(1, H, S, S))
    assert not any(d.path == "flex_attention" for d in found)
    why = LOOKALIKES[function]
    assert (why is None) == (not found) and (why is None or why in found[0].why), found


def test_a_lookalike_is_no_error_with_strict():
    """It is as fast as with stock, and ``strict`` is for what gradfuse would make faster."""
    inputs = *tensors(), randn(1, H, S, S)
    (found,) = decisions(softmax_over_queries, *inputs, options={"strict": True})
    assert found.path == "stock"


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_scores_are_dropped_before_the_softmax(probability):
    def function(q, k, v, bias):
        return F.dropout(q @ k.mT + bias, probability).softmax(-1) @ v

    with collect() as report, eager_graphs():
        torch._dynamo.reset()
        torch.compile(function, backend="gradfuse", fullgraph=True)(*tensors(), randn(1, H, S, S))
    found = [d.path for d in report.decisions if d.pass_name == "attention_pattern"]
    assert ("flex_attention" in found) == (probability == 0.0)


def test_dropout_of_scores_that_drops_nothing_is_no_dropout():
    (found,) = decisions(dropout_on_scores, *tensors(), randn(1, H, S, S))
    assert found.path == "flex_attention"


def repeated_heads(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], attn_mask=bias, enable_gqa=True)


@pytest.mark.parametrize(
    "function", [probabilities_are_returned, softmax_over_queries, repeated_heads], ids=lambda f: f.__name__
)
def test_nobody_is_warned_about_attention_that_reads_nothing_learned(function, caplog):
    decisions(function, *tensors(), randn(1, H, S, S, grad=False))
    assert not [r for r in caplog.records if r.name == "gradfuse"]


def test_what_is_refused_leaves_no_nodes_behind():
    """It is known only while the score_mod is built that a mask is chosen by a learned tensor."""
    graphs = []

    def inspect(gm, _):
        before = len(gm.graph.nodes)
        with collect() as report:
            _recognise(gm)
        graphs.append(([d.path for d in report.decisions], len(gm.graph.nodes) - before))
        return gm

    def function(q, k, v, bias):
        return torch.where(bias <= 0.1, -1e9, q @ k.mT + bias).softmax(-1) @ v

    torch.compile(function, backend=inspect, fullgraph=True)(*tensors(), randn(1, H, S, S))
    assert graphs == [(["stock"], 0)]


def bias_changes_before_the_values(q, k, v, bias):
    bias = bias * 1.0
    p = (q @ k.mT + bias).softmax(-1)
    bias.mul_(3.0)
    return p @ v + bias.sum()


def an_index_changes_between(q, k, v, table):
    index = torch.arange(S)[:, None] - torch.arange(S)[None, :] + S
    bias = table[:, index.clone()]
    index.zero_()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias) + index.sum()


def a_view_of_an_index_changes_between(q, k, v, table):
    index = torch.arange(S)[:, None] - torch.arange(S)[None, :] + S
    bias = table[:, index * 1]
    index[3:, 2:] = 0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def an_index_changes_first(q, k, v, table):
    index = torch.arange(S)[:, None] - torch.arange(S)[None, :] + S
    rows = index[3:]
    rows.zero_()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=table[:, index])


def scores_are_added_to_a_bias_in_place(q, k, v, bias):
    bias = bias.expand(B, -1, -1, -1) * 1.0
    twice = bias.view(-1)
    bias += q @ k.mT
    return bias.softmax(-1) @ v + twice.sum()


def scores_are_added_in_place_beside_what_is_dropped(q, k, v, bias):
    """The last view has the shape of the probabilities, but the memory of what is also returned."""
    base = torch.ones(B, H, S, S)
    scores = base.add_(q @ k.mT)
    probabilities = (scores + bias).softmax(-1)
    base.expand_as(probabilities).mT  # noqa: B018
    return probabilities @ v + base.sum()


def a_bias_is_computed_without_gradient(q, k, v, table):
    with torch.no_grad():
        frozen = table[:, (torch.arange(S)[:, None] - torch.arange(S)[None, :]) + S]
    learned = table[:, :1, None]
    return (q @ k.mT + frozen + learned * torch.arange(S)).softmax(-1) @ v


def a_detached_bias(q, k, v, table):
    near = (torch.arange(S)[:, None] - torch.arange(S)[None, :]) + S
    return (q @ k.mT + table[:, near].detach() + table[:, near].sin()).softmax(-1) @ v


BIAS, TABLE = (1, H, S, S), (H, 2 * S)
#: The shape of what each function reads.
EFFECTS = {
    bias_changes_before_the_values: BIAS,
    an_index_changes_between: TABLE,
    a_view_of_an_index_changes_between: TABLE,
    an_index_changes_first: TABLE,
    a_bias_is_computed_without_gradient: TABLE,
    a_detached_bias: TABLE,
    scores_are_added_to_a_bias_in_place: BIAS,
    scores_are_added_in_place_beside_what_is_dropped: BIAS,
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("function", EFFECTS, ids=lambda f: f.__name__)
def test_effects_between_a_bias_and_its_use(function):
    (found,) = decisions(function, *tensors(), randn(*EFFECTS[function]))
    assert found.path == "flex_attention"


def test_nothing_of_an_attention_stays_whose_probabilities_are_dropped():
    def function(q, k, v, bias):
        probabilities = F.dropout((q @ k.mT + bias).softmax(-1), 0.5, True)
        _ = probabilities.permute(0, 3, 1, 2)
        return probabilities @ v

    graphs = []
    torch.compile(function, backend=lambda gm, _: graphs.append(gm) or gm, fullgraph=True)(*tensors(), randn(1, H, S, S))
    _recognise(graphs[0])
    names = {getattr(n.target, "__name__", n.target) for n in graphs[0].graph.nodes}
    assert not names & {"softmax", "dropout"}, names


def test_what_computes_no_tensor_may_have_an_effect():
    graph = torch.fx.Graph()
    assert not has_no_effect(graph.call_function(torch._assert_async, (graph.placeholder("x"),)))


def test_a_deep_model_behind_an_attention():
    """What comes of an attention is not followed, neither by recursion nor on each of many paths."""

    def function(q, k, v, bias):
        out = biased(q, k, v, bias) + (q @ k.mT + bias).softmax(-1) @ v
        for _ in range(600):
            out = out + out * 0.5
        return out

    graphs = []
    torch.compile(function, backend=lambda gm, _: graphs.append(gm) or gm, fullgraph=True)(*tensors(), randn(1, H, S, S))
    with collect() as report:
        _recognise(graphs[0])
    assert [d.path for d in report.decisions] == ["flex_attention"] * 2


def biased(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_a_frozen_bias_stays_with_stock():
    assert not decisions(biased, *tensors(), randn(1, H, S, S, grad=False))


def test_few_scores_on_a_cpu_stay_with_stock(monkeypatch):
    monkeypatch.setattr(rewrite_module, "FEWEST_ON_CPU", B * H * S * S + 1)
    (found,) = decisions(biased, *tensors(), randn(1, H, S, S))
    assert "faster on a CPU" in found.why
    monkeypatch.setattr(rewrite_module, "FEWEST_ON_CPU", B * H * S * S)
    (found,) = decisions(biased, *tensors(), randn(1, H, S, S))
    assert found.path == "flex_attention"


def test_inference_stays_with_stock():
    with torch.no_grad(), collect() as report:
        compiled = torch.compile(biased, backend="gradfuse", fullgraph=True)
        compiled(*tensors(), randn(1, H, S, S))
    assert not [d for d in report.decisions if d.pass_name == "attention_pattern"]


@pytest.mark.parametrize("length", [1, 8])
def test_short_sequences_stay_with_stock(length):
    (found,) = decisions(biased, *(randn(B, H, length, D) for _ in range(3)), randn(1, H, length, length))
    assert "fewer than 16" in found.why


def test_the_pass_can_be_disabled():
    assert not decisions(biased, *tensors(), randn(1, H, S, S), options={"disable": ["attention_pattern"]})


def relative(q, k, v, table, exists):
    """T5 with sizes that are read from the tensors."""
    batch, _, length, _ = q.shape
    position = torch.arange(length)
    bias = F.embedding((position[None, :] - position[:, None]).clamp(-9, 9) + 9, table).permute(2, 0, 1).unsqueeze(0)
    scores = q @ k.transpose(-1, -2) + bias
    scores = scores + torch.where(exists[:, None, None, :].expand(batch, 1, length, length), 0.0, LOWEST)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)


@pytest.mark.breadth(0)
def test_symbolic_lengths():
    exists = torch.ones(B, S, dtype=torch.bool)
    exists[0, 20:], exists[1] = False, False
    # Dynamo compiles it a second time, because a Python float of the mask cannot be symbolic.
    *_, found = decisions(relative, *tensors(), randn(19, H), exists, dynamic=True)
    assert found.path == "flex_attention"


def test_a_symbolic_bias():
    (found,) = decisions(biased, *tensors(), randn(1, H, S, S), dynamic=True)
    assert found.path == "flex_attention"


def test_several_attentions_of_one_graph():
    def function(q, k, v, bias):
        p = (q @ k.mT + bias).softmax(-1)
        return ((q @ k.mT + bias) * p.mean()).softmax(-1) @ (p @ v)

    assert [d.path for d in decisions(function, *tensors(), randn(1, H, S, S))] == ["stock", "flex_attention"]


def test_queries_and_keys_of_other_lengths():
    (found,) = decisions(biased, randn(B, H, 20, D), randn(B, H, 33, D), randn(B, H, 33, 24), randn(B, 1, 20, 33))
    assert found.path == "flex_attention"


def test_a_row_whose_mask_is_finite_and_large():
    """NeMo masks with -10000: a row that is masked as a whole is an ordinary row."""

    def function(q, k, v, bias, mask):
        scores = (q @ k.mT + bias).masked_fill(mask, -10000.0)
        return scores.softmax(-1) @ v

    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    mask[0, :, 3], mask[1, :, :, 20:] = True, True
    (found,) = decisions(function, *tensors(), randn(1, H, S, S), mask)
    assert found.path == "flex_attention"


def test_masks_that_are_added_twice():
    def function(q, k, v, bias, mask):
        scores = q @ k.mT + bias
        return ((scores + mask) + mask).softmax(-1) @ v

    mask = torch.zeros(B, 1, 1, S)
    mask[0, ..., 5:] = -1e4
    mask[1] = LOWEST / 4
    (found,) = decisions(function, *tensors(), randn(1, H, S, S), mask)
    assert found.path == "flex_attention"


def _recognise(gm):
    """Run the pass as the backend does: it also checks and recompiles the graph."""
    next(each for each in ORDER if each.name == "attention_pattern")(gm, Options())


def test_what_is_computed_on_another_device():
    """BEiT computes its index, and Swin its mask, on the CPU. A kernel reads tensors of one device."""
    devices = []

    def inspect(gm, _):
        _recognise(gm)
        (node,) = gm.graph.find_nodes(op="call_function", target=flex_attention_hop)
        devices.extend(fake_tensor(x).device.type for x in node.all_input_nodes if fake_tensor(x) is not None)
        return gm

    def function(q, k, v, table):
        i = torch.arange(S)
        index = torch.zeros(S, S, dtype=torch.int64)
        index[1:, 1:] = (i[1:, None] - i[None, 1:]).abs()
        mask = torch.zeros(S, S).masked_fill(index > 5, -100.0).to(q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=table[:, index] + mask)

    inputs = [torch.empty(shape, device="meta", requires_grad=True) for shape in (*[(B, H, S, D)] * 3, (H, S))]
    out = torch.compile(function, backend=inspect, fullgraph=True)(*inputs)
    assert out.shape == (B, H, S, D) and set(devices) == {"meta"}


def test_a_sink_in_float64_stays_with_stock():
    def function(q, k, v, sink):
        logits = torch.cat([q @ k.mT, sink.view(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)
        return logits.softmax(-1)[..., :-1] @ v

    inputs = [x.detach().double().requires_grad_() for x in (*tensors(), randn(H))]
    run = torch.compile(function, backend="gradfuse", fullgraph=True)
    with collect() as report:
        got = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    assert [d.path for d in report.decisions if d.pass_name == "attention_pattern"] == ["stock"]
    for x, y in zip(got, torch.autograd.grad(function(*inputs).square().sum(), inputs), strict=True):
        assert (x - y).norm() < 1e-12 * y.norm()


def test_float64_on_a_gpu_stays_with_stock():
    """Stock has no kernel for it, and neither has gradfuse."""
    reasons = []

    def inspect(gm, _):
        with collect() as report:
            _recognise(gm)
        reasons.extend(d.why for d in report.decisions)
        return gm

    inputs = [torch.empty(s, device="meta", dtype=torch.float64, requires_grad=True) for s in (*[(B, H, S, D)] * 3, (S, S))]
    torch.compile(biased, backend=inspect, fullgraph=True)(*inputs)
    assert reasons == ["its dtype is float64, for which there is no kernel"]
