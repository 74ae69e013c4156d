"""What every other part may use: errors, axis letters, names with suggestions, seeds."""
