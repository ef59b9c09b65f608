"""gradfuse beside the rest of PyTorch: parallelism, checkpointing, graph capture, caches, threads, long runs."""
