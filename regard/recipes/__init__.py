"""Complete training runs: each recipe has a model, data, a training plan and the result that is expected."""
