"""Claims about attention itself."""
