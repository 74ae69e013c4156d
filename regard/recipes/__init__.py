"""Complete runs: model, data and training, each with the result it is expected to reach."""
