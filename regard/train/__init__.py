"""Training: one loop for every model and task.

A run that was stopped resumes from its checkpoint. On one CPU in float32, its result is the same as without the stop.
"""
