"""flex_attention with learned biases."""
