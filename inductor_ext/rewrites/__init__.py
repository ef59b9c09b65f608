"""FX graph to FX graph; nothing here knows of Triton."""
