"""What the choice of tiles asks about the graph of a score_mod."""

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.attention.score_graphs import chained_reads, differs_by_pair

DOC, TABLE, PAIRS = torch.zeros(8, dtype=torch.int64), torch.zeros(8), torch.zeros(8, 8, dtype=torch.int64)


def graph(score_mod):
    index = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    with TransformGetItemToIndex():
        return make_fx(score_mod, tracing_mode="fake")(torch.zeros(()), *index, DOC, TABLE, PAIRS)


@pytest.mark.parametrize(
    "score_mod, chained, by_pair",
    [
        pytest.param(lambda s, b, h, q, k, doc, table, pairs: s + table[q] * table[k], 0, [], id="no index is read"),
        pytest.param(lambda s, b, h, q, k, doc, table, pairs: s + table[doc[q]], 1, [False], id="of the query"),
        pytest.param(lambda s, b, h, q, k, doc, table, pairs: s + table[doc[q] - doc[k]], 2, [False] * 2, id="of both"),
        pytest.param(lambda s, b, h, q, k, doc, table, pairs: s + table[pairs[q, k]], 1, [True], id="of the pair"),
        pytest.param(lambda s, b, h, q, k, doc, table, pairs: s + table[doc[q - k]], 1, [True], id="of a distance"),
    ],
)
def test_reads_of_which_an_index_is_computed(score_mod, chained, by_pair):
    reads = chained_reads(graph(score_mod))
    assert len(reads) == chained and [differs_by_pair(read) for read in reads] == by_pair
