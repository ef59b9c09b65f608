"""A small example of the main use: gradfuse trains a language model whose attention has learned biases."""
