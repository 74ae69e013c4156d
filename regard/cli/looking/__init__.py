"""The parts of `regard look`: what a model is asked, what its answer owes to it, and how a terminal shows it."""
