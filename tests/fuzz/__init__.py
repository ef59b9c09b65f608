"""Random programs for gradfuse, judged against float64: ``python -m tests.fuzz --help``."""
