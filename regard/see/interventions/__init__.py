"""Interventions: change what attention heads compute while a model runs."""
