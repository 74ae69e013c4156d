"""The lab: one question a file, answered by a run that can come out either way."""
