"""Kernels and gradients for associative_scan over any pytree."""
