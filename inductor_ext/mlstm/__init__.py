"""mLSTM, the matrix memory of xLSTM.

``mlstm`` is the op. ``MLSTMCell`` is the layer around it, with its headwise norm.
"""

from .cell import MLSTMCell
from .op import mlstm

__all__ = ["MLSTMCell", "mlstm"]
