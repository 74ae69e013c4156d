"""The conformance checker: what an attention or a decoder breaks, by name, in words, with the smallest input."""

from regard.conform.check import check
from regard.conform.make_probe import probe_of
from regard.conform.pytest_class import conformance
from regard.conform.report import Report

__all__ = ["Report", "check", "conformance", "probe_of"]
