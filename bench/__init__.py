"""Benchmarks of speed and memory: ratios to other libraries, each after a correctness check."""


def main(argv: list[str]) -> int:
    """Run the benchmark of attention, or that of growth if the first word is `growth`.

    The exit code is 0 if every target was reached, 1 if not.
    """
    # imported here so that a part of this package can be imported alone
    if argv[:1] == ["growth"]:
        from bench.growth import main as measure_growth

        return measure_growth(argv[1:])
    from bench.attention import main as compare

    return compare(argv)
