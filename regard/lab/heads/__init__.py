"""Claims about heads and self-attention."""
