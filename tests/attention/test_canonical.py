"""The rewrite of score_mods on Dynamo's graph: the result for each pattern."""

import pytest
import torch
from expecttest import TestCase
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext import passes
from tests.support.dynamo_graphs import after


def rewritten(score_mod, *, needs_grad=True):
    """What the rewrite makes of a score_mod: FX graph, kernel options, number of operands, notes."""
    query = torch.randn(1, 2, 8, 16, requires_grad=needs_grad)
    seen = after(passes.canonical, lambda q: flex_attention(q, q, q, score_mod=score_mod), query)
    node, notes = seen["node"], [d.why for d in seen["decisions"]]
    return {"graph": seen["graph"], "options": node.args[6], "operands": len(node.args[7]), "notes": "".join(notes[:1])}


class TestScoreMods(TestCase):
    def test_nested_indexing_is_flattened(self):
        table = torch.randn(8, 3, requires_grad=True)
        self.assertExpectedInline(
            rewritten(lambda s, b, h, q, k: s + table[q][0])["graph"],
            """\
graph():
    %child [num_users=1] = placeholder
    %child_1 [num_users=0] = placeholder
    %child_2 [num_users=0] = placeholder
    %child_3 [num_users=1] = placeholder
    %child_4 [num_users=0] = placeholder
    %l_score_mod_closure_0_cell_contents [num_users=1] = placeholder
    %getitem_1 : [num_users=1] = call_function[target=operator.getitem](args = (%l_score_mod_closure_0_cell_contents, (%child_3, 0)))
    %add : [num_users=1] = call_function[target=operator.add](args = (%child, %getitem_1))
    return add""",
        )

    def test_work_on_captured_tensors_alone_moves_out(self):
        table = torch.randn(2, requires_grad=True)
        self.assertExpectedInline(
            rewritten(lambda s, b, h, q, k: s * table.exp()[h])["graph"],
            """\
graph():
    %child [num_users=1] = placeholder
    %child_1 [num_users=0] = placeholder
    %child_2 [num_users=1] = placeholder
    %child_3 [num_users=0] = placeholder
    %child_4 [num_users=0] = placeholder
    %captured_exp : [num_users=1] = placeholder
    %getitem : [num_users=1] = call_function[target=operator.getitem](args = (%captured_exp, %child_2))
    %mul : [num_users=1] = call_function[target=operator.mul](args = (%child, %getitem))
    return mul""",
        )

    def test_a_zero_dim_capture_is_indexed(self):
        scale = torch.tensor(2.0, requires_grad=True)
        self.assertExpectedInline(
            rewritten(lambda s, b, h, q, k: s * scale)["graph"],
            """\
graph():
    %child [num_users=1] = placeholder
    %child_1 [num_users=0] = placeholder
    %child_2 [num_users=0] = placeholder
    %child_3 [num_users=0] = placeholder
    %child_4 [num_users=0] = placeholder
    %l_score_mod_closure_0_cell_contents [num_users=1] = placeholder
    %getitem : [num_users=1] = call_function[target=operator.getitem](args = (%l_score_mod_closure_0_cell_contents, (0,)))
    %mul : [num_users=1] = call_function[target=operator.mul](args = (%child, %getitem))
    return mul""",
        )

    def test_an_output_without_the_score_is_connected(self):
        table = torch.randn(8, 8, requires_grad=True)
        self.assertExpectedInline(
            rewritten(lambda s, b, h, q, k: table[q, k])["graph"],
            """\
graph():
    %child [num_users=1] = placeholder
    %child_1 [num_users=0] = placeholder
    %child_2 [num_users=0] = placeholder
    %child_3 [num_users=2] = placeholder
    %child_4 [num_users=1] = placeholder
    %l_score_mod_closure_0_cell_contents [num_users=1] = placeholder
    %getitem : [num_users=1] = call_function[target=operator.getitem](args = (%l_score_mod_closure_0_cell_contents, (%child_3, %child_4)))
    %ge : [num_users=1] = call_function[target=operator.ge](args = (%child_3, 0))
    %where : [num_users=1] = call_function[target=torch.where](args = (%ge, %getitem, %child))
    return where""",
        )


def test_an_unused_capture_is_dropped():
    table = torch.randn(2, requires_grad=True)
    seen = rewritten(lambda s, b, h, q, k: (table[h], s)[1])
    assert seen["operands"] == 0
    assert seen["notes"] == "a captured tensor that is not used is dropped"


@pytest.mark.parametrize("needs_grad", [True, False])
def test_the_logsumexp_is_asked_for_where_a_gradient_needs_it(needs_grad):
    seen = rewritten(lambda s, b, h, q, k: s, needs_grad=needs_grad)
    assert seen["options"]["OUTPUT_LOGSUMEXP"] is needs_grad


def test_a_plain_score_mod_is_left_alone():
    table = torch.randn(2, 8)
    assert rewritten(lambda s, b, h, q, k: s + table[h, k])["notes"] == ""
