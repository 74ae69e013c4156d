"""Scripts of the project itself: audits, release checks, the API reference and the documentation site."""
