"""The only package that imports names of torch that are not documented API.

No other module imports such a name or asks for torch's version, so a new release of torch needs changes in this package
only. The table in ``versions.py`` lists every name, and an import of any module of this package checks that table first.

    frontend      Dynamo: the registry of backends, and checks that refuse a program before a backend sees a graph
    config        Inductor's configuration and caches, and the compiler itself
    lowering      Inductor's tables of lowerings and decompositions
    higher_order  flex_attention, associative_scan and loops as nodes of a graph
    graph         operators and nested values
    sizes         sizes that may be symbolic
    ir            buffers, layouts and strides
    template      Triton templates
    tracing       functions to graphs, and the structured trace
"""

from .versions import check

check()
