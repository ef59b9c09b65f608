"""Custom ops with an eager reference each; importing this registers them."""

from .depend import depend
from .mlstm import mlstm_op, mlstm_reference
from .row_sums import gather_sum, place_rows, segment_sum

__all__ = ["depend", "gather_sum", "mlstm_op", "mlstm_reference", "place_rows", "segment_sum"]
