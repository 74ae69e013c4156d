"""Data sets and tokenizers: plain batches of tokens, images and sound, and nothing of models."""
