"""Claims about whole Transformers."""
