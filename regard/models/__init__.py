"""Transformer models, and the baseline models they are compared with.

Each architecture has a file with its configuration class, its model and its presets. The other files build, save, load
and convert models, and generate text.
"""
