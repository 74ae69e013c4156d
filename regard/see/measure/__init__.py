"""What an x-ray is made of: the eye that asks, the plate it exposes, and one file for each thing read from it."""
