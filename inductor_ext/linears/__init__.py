"""Linear layers that read the same input."""
