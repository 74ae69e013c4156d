"""Base of all other folders: errors, axis letters, configurations, file readers, formulas, registries and seeds."""
