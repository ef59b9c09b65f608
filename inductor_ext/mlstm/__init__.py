"""mLSTM, the matrix memory of xLSTM.

``mlstm`` is the op. ``MLSTMCell`` is the layer around it, with its headwise norm.
"""

from .api import mlstm
from .cell import MLSTMCell

__all__ = ["MLSTMCell", "mlstm"]
