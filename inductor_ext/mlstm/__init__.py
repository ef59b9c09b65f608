"""The matrix memory of xLSTM."""
