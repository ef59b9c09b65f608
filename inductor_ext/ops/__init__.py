"""Custom ops with an eager reference each; importing this registers them."""

from .depend import depend
from .linear_scan import linear_scan
from .mlstm import mlstm_op, mlstm_reference
from .row_sums import gather_sum, place_rows, segment_sum
from .stored import stored

__all__ = ["depend", "gather_sum", "linear_scan", "mlstm_op", "mlstm_reference", "place_rows", "segment_sum", "stored"]
