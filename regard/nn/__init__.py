"""Modules that own parameters: what models are built of. Everything they compute goes through `regard.core`."""
