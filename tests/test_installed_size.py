"""What an installation of regard adds to torch and numpy."""

from tools.installed_size import added_packages, closure, installed_bytes

MAX_BYTES = 130_000_000


def test_nothing_heavy_is_needed_at_run_time() -> None:
    added = added_packages()
    assert {"regard", "matplotlib", "tokenizers", "fonttools"} <= added, "what packages need is followed"
    assert not added & {"scipy", "scikit-learn", "pandas", "transformers", "pydantic", "torch", "numpy"}
    assert "scipy" in closure("scikit-learn"), "tests do use it"
    assert 50_000_000 < sum(map(installed_bytes, added)) < MAX_BYTES
