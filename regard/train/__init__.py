"""Training: one loop for every model and task. A run that was stopped resumes from its checkpoint with the same
result.
"""
