"""Speed and memory of regard beside its peers: ratios from one run, each after a correctness gate."""

from bench.report import main as main
