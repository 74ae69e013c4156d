"""Probes: call any attention function or module as a function of q, k and v."""
