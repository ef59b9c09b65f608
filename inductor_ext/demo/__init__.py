"""The main job in small: a language model whose attention has learned biases, trained through gradfuse."""
