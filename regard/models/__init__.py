"""The Transformers and the baselines they are compared with. Each file has a configuration, a model and its presets."""
