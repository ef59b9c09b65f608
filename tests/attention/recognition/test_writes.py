"""Writes that neither the name nor the schema of an op shows where Dynamo's graph calls it."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.soundness.check import check_matches_eager

from .spellings import S
from .test_regressions import attend, bias
from .test_traps import randn, tensors

KEYS = torch.arange(S)


@torch.library.custom_op("gradfuse_tests::refill", mutates_args={"x"})
def refill(x: torch.Tensor, value: float) -> None:
    """Overwrite a tensor."""
    x.fill_(value)


def by_a_custom_op(x, scores):
    mask = torch.zeros(S)
    torch.ops.gradfuse_tests.refill(mask, -5.0)
    return scores + mask * KEYS


def into_a_pair(x, scores):
    values, places = x.new_zeros(S), torch.zeros(S, dtype=torch.long)
    torch.max(x, -1, out=(values, places))
    return scores + values * KEYS


def through_numpy(x, scores):
    mask = torch.zeros(S, S)
    mask.numpy()[3:] = -2.0
    return scores + mask * KEYS


def running_statistics(x, scores):
    mean = x.mean(1)
    scores = scores + mean
    F.batch_norm(x.T * KEYS, mean, x.new_ones(S), training=True)
    return scores


def running_statistics_of_instances(x, scores):
    mean = x.mean(1)
    scores = scores + mean
    F.instance_norm(x[None] * KEYS[:, None], mean, x.new_ones(S), use_input_stats=True)
    return scores


def largest_norm(x, scores):
    table = x * 3.0
    scores = scores + table[KEYS, 1]
    with torch.no_grad():
        F.embedding(KEYS, table, max_norm=0.1)
    return scores


def in_a_checkpoint(inner):
    """A write to a mask, or to what ``inner`` makes of it, in the body of a checkpoint."""

    def function(x, scores):
        mask = x[:, 0] * 2.0

        def body(x):
            inner(mask).mul_(3.0)
            return x * 1.5

        scores = scores + mask
        return scores + checkpoint(body, x, use_reentrant=False).sum()

    return function


def beside_an_output(x, scores):
    """The op with ``out=`` reads the mask, and another one writes to it."""
    mask = x[:, 0] * 2.0
    torch.exp(mask, out=torch.zeros_like(mask))
    scores = scores + mask
    torch.ops.gradfuse_tests.refill(mask, -5.0)
    return scores


def in_a_list(x, scores):
    masks = [x[:, 0] * 2.0, x[:, 1] * 1.0]
    scores = scores + masks[0]
    torch._foreach_mul_(masks, 3.0)
    return scores


WRITES = {
    "by_a_custom_op": by_a_custom_op,
    "into_a_pair": into_a_pair,
    "through_numpy": through_numpy,
    "running_statistics": running_statistics,
    "running_statistics_of_instances": running_statistics_of_instances,
    "largest_norm": largest_norm,
    "in_a_checkpoint": in_a_checkpoint(lambda mask: mask),
    "detached_in_a_checkpoint": in_a_checkpoint(lambda mask: mask.detach()),
    "data_in_a_checkpoint": in_a_checkpoint(lambda mask: mask.data),
    "beside_an_output": beside_an_output,
    "in_a_list": in_a_list,
}


@pytest.mark.breadth(4)
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_what_scores_read(name):
    attention = lambda q, k, v, b, x: WRITES[name](x, q @ k.mT + b).softmax(-1) @ v  # noqa: E731
    check_matches_eager(attention, *tensors(), bias(), randn(S, 5, grad=False), exact=True)


@pytest.mark.parametrize("reads", ["query", "bias"])
def test_a_write_in_a_checkpoint_to_what_the_attention_saves(reads):
    """Eager code saves neither, because the keys, or the scores, need no gradient."""

    def function(q, k, v, b):
        q, b = q * 1.0, b * 1.0
        out = attend(q, k, v, b)

        def body(x):
            (q if reads == "query" else b).mul_(3.0)
            return x * 1.5

        return checkpoint(body, out.detach(), use_reentrant=False) + out

    q, k, v = tensors()
    check_matches_eager(function, q, k.detach(), v, bias(), exact=True)


def test_a_write_in_a_checkpoint_to_the_result():
    """Eager code does not save the result, and flex_attention does."""

    def function(q, k, v, b):
        out = attend(q, k, v, b)

        def body(x):
            with torch.no_grad():
                out.mul_(3.0)
            return x * 1.5

        return out + checkpoint(body, v, use_reentrant=False)

    check_matches_eager(function, *tensors(), bias(), exact=True)


@pytest.mark.parametrize("written", [0, 1])
def test_a_write_to_what_scaled_dot_product_attention_reads(written):
    """Its math keeps scaled copies."""

    def function(*inputs):
        *tensors, b = (x * 1.5 for x in inputs)
        out = F.scaled_dot_product_attention(*tensors, attn_mask=b)
        tensors[written].zero_()
        return out + tensors[written].sum()

    check_matches_eager(function, *tensors(), bias(), exact=True)
