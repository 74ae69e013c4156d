"""Examples that the page opens."""
