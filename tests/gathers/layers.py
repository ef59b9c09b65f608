"""Mixture-of-experts layers in plain PyTorch, each in the style of a public code base (its way of routing, not its code).

Every layer takes tokens [S, H], a router weight [E, H] and expert weights up [E, F, H], down [E, H, F], and returns [S, H].
"""

import torch
from torch.nn.functional import one_hot, silu


def route(tokens, router, topk):
    """Router probabilities and experts of every token, [S, topk] each. Those of the chosen experts add up to 1."""
    weight, chosen = (tokens @ router.T).softmax(-1).topk(topk, -1)
    return weight / weight.sum(-1, keepdim=True), chosen


def expert(rows, up, down):
    return silu(rows @ up.T) @ down.T


def by_expert(rows, experts, up, down):
    """Apply every expert to all rows, and keep the result of the expert of each row.

    In this way the sizes of the groups stay out of the graph.
    """
    outputs = torch.stack([expert(rows, u, d) for u, d in zip(up, down, strict=True)], 1)
    mask = one_hot(experts, len(up)).to(rows.dtype)
    return (outputs * mask.unsqueeze(-1)).sum(1)


def sorted_and_scattered(tokens, router, up, down, topk=2):
    """Sort, gather by ``order // topk``, apply experts, scatter_add with an expanded index (torchtitan, torchtune)."""
    weight, chosen = route(tokens, router, topk)
    order = chosen.view(-1).argsort(stable=True)
    index = (order // topk).reshape(-1, 1).expand(-1, tokens.shape[1])
    rows = torch.gather(tokens, 0, index)
    outputs = by_expert(rows, chosen.view(-1)[order], up, down) * weight.view(-1)[order].unsqueeze(1)
    return torch.zeros_like(tokens).scatter_add(0, index, outputs)


def permuted_and_restored(tokens, router, up, down, topk=2):
    """Index by ``order // topk``, apply experts, restore by index_copy_ and a weighted sum over the choices (unsloth)."""
    weight, chosen = route(tokens, router, topk)
    order = chosen.view(-1).argsort(stable=True)
    outputs = by_expert(tokens[order // topk], chosen.view(-1)[order], up, down)
    restored = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return (restored.view(len(tokens), topk, -1) * weight.unsqueeze(-1)).sum(1)


def repeated_and_inverted(tokens, router, up, down, topk=2):
    """Repeat every token, permute, apply experts, undo by the inverse permutation, index_add (transformers 4.57)."""
    weight, chosen = route(tokens, router, topk)
    source = torch.arange(len(tokens), device=tokens.device).unsqueeze(1).expand(-1, topk).reshape(-1)
    order = chosen.view(-1).argsort()
    inverse = order.argsort()
    outputs = by_expert(tokens[source][order], chosen.view(-1)[order], up, down)
    return torch.zeros_like(tokens).index_add(0, source, outputs[inverse] * weight.reshape(-1, 1))


def masked_rows(tokens, router, up, down, topk=2):
    """Sort the true entries of a dense routing map to the front, index_select, scatter_add (Megatron's unfused path)."""
    weight, chosen = route(tokens, router, topk)
    probabilities = torch.zeros(len(tokens), len(up), dtype=tokens.dtype, device=tokens.device).scatter(1, chosen, weight)
    routed = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, chosen, True)
    flat = routed.T.reshape(-1).int().argsort(descending=True, stable=True)[: len(tokens) * topk]
    source = flat % len(tokens)
    rows = tokens.index_select(0, source)
    outputs = by_expert(rows, flat // len(tokens), up, down) * probabilities.T.reshape(-1)[flat].unsqueeze(1)
    return torch.zeros_like(tokens).scatter_add(0, source.unsqueeze(1).expand(-1, tokens.shape[1]), outputs)


def with_capacity(tokens, router, up, down, topk=2):
    """Each expert takes its first ``capacity`` tokens in order of arrival; the other tokens are dropped."""
    weight, chosen = route(tokens, router, topk)
    capacity = len(tokens) * topk // len(up)
    experts = chosen.T.reshape(-1)
    arrival = one_hot(experts, len(up)).cumsum(0).gather(1, experts.unsqueeze(1)).squeeze(1) - 1
    kept = (arrival < capacity).to(tokens.dtype)
    slot = experts * capacity + arrival.clamp(max=capacity - 1)
    source = torch.arange(len(tokens), device=tokens.device).repeat(topk)
    buffer = torch.zeros(len(up) * capacity, tokens.shape[1], dtype=tokens.dtype, device=tokens.device)
    buffer = buffer.index_add(0, slot, tokens[source] * kept.unsqueeze(1)).view(len(up), capacity, -1)
    outputs = torch.bmm(silu(torch.bmm(buffer, up.mT)), down.mT).view(len(up) * capacity, -1)
    gate = weight.T.reshape(-1) * kept
    return torch.zeros_like(tokens).index_add(0, source, outputs[slot] * gate.unsqueeze(1))


def chosen_by_experts(tokens, router, up, down, topk=2):
    """Expert choice: each expert takes the tokens with the highest router probabilities."""
    capacity = len(tokens) * topk // len(up)
    weight, taken = (tokens @ router.T).softmax(-1).T.topk(capacity, -1)
    rows = tokens[taken.reshape(-1)].view(len(up), capacity, -1)
    outputs = torch.bmm(silu(torch.bmm(rows, up.mT)), down.mT) * weight.unsqueeze(-1)
    return torch.zeros_like(tokens).index_add(0, taken.reshape(-1), outputs.view(-1, tokens.shape[1]))


def with_weights_of_tokens(tokens, router, up, down, topk=2):
    """Each token looks up the weights of its experts, for a batched matmul (transformers' batched_mm)."""
    weight, chosen = route(tokens, router, topk)
    experts = chosen.reshape(-1)
    rows = tokens.repeat_interleave(topk, dim=0).unsqueeze(-1)
    outputs = torch.bmm(down[experts], silu(torch.bmm(up[experts], rows))).squeeze(-1)
    return (outputs * weight.reshape(-1, 1)).view(len(tokens), topk, -1).sum(1).to(tokens.dtype)


def grouped(tokens, router, up, down, topk=2):
    """Sort, gather, one grouped matmul for all experts, multiply by weights, index_add (torchtitan, transformers 5).

    It is not in LAYERS, because it runs only in bf16 on a GPU.
    """
    weight, chosen = route(tokens, router, topk)
    experts, order = chosen.view(-1).sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(1, len(up) + 1, device=tokens.device)).to(torch.int32)
    hidden = silu(torch._grouped_mm(tokens[order // topk], up.mT, ends))
    outputs = torch._grouped_mm(hidden, down.mT, ends) * weight.view(-1)[order].unsqueeze(1)
    return torch.zeros_like(tokens).index_add(0, order // topk, outputs)


def looped_over_experts(tokens, router, up, down, topk=2):
    """Loop over experts with nonzero rows and index_add_ (Mixtral). The sizes depend on data."""
    weight, chosen = route(tokens, router, topk)
    out = torch.zeros_like(tokens)
    for e in range(len(up)):
        source, choice = torch.where(chosen == e)
        out.index_add_(0, source, expert(tokens[source], up[e], down[e]) * weight[source, choice, None])
    return out


LAYERS = (
    sorted_and_scattered,
    permuted_and_restored,
    repeated_and_inverted,
    masked_rows,
    with_capacity,
    chosen_by_experts,
    looped_over_experts,
    with_weights_of_tokens,
)
