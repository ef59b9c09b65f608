"""associative_scan, on Dynamo's graph: the same scan with a gradient that is right.

In its "pointwise" mode the op's own gradient scans once for every element, and comes back as zero for some leaves (seen with
the gated recurrence in torch 2.11). In "generic" mode Dynamo expands the op before we see it, and autograd is right.
"""

from __future__ import annotations

from torch.fx import GraphModule

from ..compat import associative_scan_hop
from ..ops.scan import scan
from ..options import Options
from ..report import record, user_line

NAME = "scans"


def rewrite(gm: GraphModule, own: Options) -> None:
    """Replace, in place, every pointwise associative_scan by ``ops.scan.scan``."""
    if not own.enabled(NAME):
        return
    for node in gm.graph.find_nodes(op="call_function", target=associative_scan_hop):
        node.target = scan
        record(NAME, "associative_scan", "scan", "its gradient is one pass back through time", user_line(node))
    gm.recompile()
