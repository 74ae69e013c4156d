"""Benchmarks of speed and memory: ratios to other libraries, each after a correctness check."""


def main(argv: list[str]) -> int:
    """Run the benchmark of attention. The exit code is 0 if every target was reached, 1 if not."""
    from bench.attention import main as run  # so that a part of this package can be imported alone

    return run(argv)
