"""Run the graphs that gradfuse hands to Inductor as they are, eagerly: what a rewrite made of a model, without code generation."""

import contextlib
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from inductor_ext.torch_api import config
from inductor_ext.torch_api.config import without_caches


def without_views(outputs):
    """The results of a graph as Inductor's code returns them: autograd does not see which of them share memory."""

    return tree_map(lambda x: x.data if isinstance(x, torch.Tensor) and x._is_view() else x, outputs)


@contextlib.contextmanager
def eager_graphs():
    """Inside the block gradfuse compiles as always, up to the point where Inductor would lower the rewritten graphs.

    Yields the list of these graphs, in the order of their compilation.
    """
    graphs = []

    def as_it_is(gm, example_inputs, **kwargs):
        graphs.append(gm)

        def run(arguments):
            inputs = list(arguments)
            arguments.clear()
            return without_views(gm(*inputs))

        run._boxed_call = True
        return run

    with without_caches(), mock.patch.object(config, "compile_fx_inner", as_it_is):
        yield graphs
