"""Example files that the explorer's page opens."""
