"""Worked solutions: attention by hand, every step written out, and a student's own steps looked over."""
