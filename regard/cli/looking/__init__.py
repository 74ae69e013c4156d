"""The parts of `regard look`: inputs of a model, relevance, and output in a terminal."""
