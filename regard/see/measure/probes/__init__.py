"""Probes: any function or module that attends, callable as a function of q, k and v."""
