"""Speed and memory of regard beside its peers: ratios from one run, each after a correctness gate."""


def main(argv: list[str]) -> int:
    """Run the benchmark; exit code 0 if every target was reached, 1 if not."""
    from bench.report import main as run  # a part of this package can then be imported without the rest

    return run(argv)
