"""Casts that need not be."""
