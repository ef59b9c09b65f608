"""Gathers and their gradients, the scatter-adds."""
