"""Attention as models spell it: recognised on Dynamo's graph, and replaced by flex_attention with a score_mod."""
