"""associative_scan over any pytree."""
