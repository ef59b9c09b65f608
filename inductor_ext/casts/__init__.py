"""Casts that need not be, and casts that share a kernel."""
