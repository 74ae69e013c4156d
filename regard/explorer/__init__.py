"""The explorer: a web page that shows attention, masks and models."""
