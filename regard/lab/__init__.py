"""The lab: one question per file, answered by a run whose numbers decide."""
