"""The matrix memory of xLSTM: ``mlstm``, the op, and ``MLSTMCell``, the layer around it with its headwise norm."""

from .cell import MLSTMCell
from .op import mlstm

__all__ = ["MLSTMCell", "mlstm"]
