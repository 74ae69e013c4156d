"""Benchmarks of speed and memory: ratios to other libraries, each after a correctness check."""


def main(argv: list[str]) -> int:
    """Run `bench.growth` if the first argument is `growth`, else `bench.attention`.

    Returns the exit code: 0 if every target was reached, else 1.
    """
    # imported here so that a part of this package can be imported alone
    if argv[:1] == ["growth"]:
        from bench.growth import main as measure_growth

        return measure_growth(argv[1:])
    from bench.attention import main as compare

    return compare(argv)
