"""Hooks into other libraries."""
