"""Training: one loop for every model and task, whose runs can be killed at any instant and go on as if they had not."""
