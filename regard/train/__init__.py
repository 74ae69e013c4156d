"""Training: one loop for every model and task, with checkpoints; a killed run resumes from one with the same result."""
