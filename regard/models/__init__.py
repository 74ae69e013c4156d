"""The Transformers and what they are compared with: one file each, with a configuration, a model and its presets."""
