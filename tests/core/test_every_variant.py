"""Every registered score term, feature map and rope scaling: exported, documented, and the same in every kernel."""

import doctest
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard import attend, causal, linear_attend
from regard.base.errors import KernelRefusedError
from regard.core import linear, positions, scores
from regard.core.absolute_positions import Grid
from regard.core.kernels import KERNELS
from regard.core.linear import FEATURE_MAPS
from regard.core.positions import ROPE_SCALINGS, DynamicNTK, rotary
from regard.core.scores import EXAMPLES, TERMS, ScoreTerm
from regard.see.serialization import load
from regard.see.watch import watch
from tests.properties import draw

QUERIES, J, H, C = 7, 11, 6, 5
PAGE = Path(regard.__file__).parents[1] / "docs" / "mechanisms.md"
# arguments that fit q (2, 6, i, 5) and k (2, 3, 11, 5); a new term adds its own here
SIZES = scores.Sizes(H, QUERIES, J, C, torch.randn)
MODULES = [(scores, TERMS), (linear, FEATURE_MAPS), (positions, ROPE_SCALINGS)]
NAMES = [(module, name) for module, registry in MODULES for name in registry]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_variant_is_documented(module: object, name: str) -> None:
    make = getattr(module, name)
    assert inspect.getdoc(make), f"{name} has no docstring"
    assert f"`{name}(" in PAGE.read_text(), f"docs/mechanisms.md has no line for {name}"
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(recurse=False).find(make, name, globs={**vars(module), "attend": attend}):
        assert runner.run(test, out=lambda text: None).failed == 0, f"the example of {name} prints something else"


@pytest.mark.parametrize("name", list(TERMS))
def test_a_score_term_is_public_and_has_an_example(name: str) -> None:
    assert getattr(regard, name, None) is getattr(scores, name), f"regard/__init__.py does not export {name}"
    assert name in EXAMPLES, f"regard/core/scores.py has no example of {name}: add one with @EXAMPLES.add"


def assert_same_in_every_kernel(term: ScoreTerm) -> None:
    q, k, v = draw(QUERIES, J, dtype=torch.float64)
    truth = attend(q, k, v, mask=causal(), scores=term, kernel="reference")
    assert (truth - attend(q, k, v, mask=causal(), kernel="reference")).abs().max() > 1e-3
    for kernel in set(KERNELS) - {"flex", "reference"}:
        try:
            out = attend(q, k, v, mask=causal(), scores=term, kernel=kernel)
        except KernelRefusedError:
            continue
        torch.testing.assert_close(out, truth, atol=1e-12, rtol=1e-12, msg=f"{kernel} with {term}")


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_a_score_term_is_the_same_in_every_kernel(name: str) -> None:
    assert_same_in_every_kernel(EXAMPLES[name](SIZES))


class Parity(scores.ScoreTerm):
    """A term as one would first write it: its values have torch's default dtype, not that of the scores."""

    name = "parity"

    def bind(self, q: Tensor, beta: float) -> Callable[[Tensor, Grid], Tensor]:
        return lambda scores, grid: scores + 1.5 * ((grid.i + grid.j) % 2 == 0)


def test_a_score_term_whose_values_have_another_dtype_is_the_same_in_every_kernel() -> None:
    assert_same_in_every_kernel(Parity())


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_a_saved_score_term_is_loaded_again(name: str, tmp_path: Path) -> None:
    q, k, v = draw(QUERIES, J)
    with watch() as seen:
        attend(q, k, v, scores=EXAMPLES[name](SIZES))
    seen.save(tmp_path / "seen")
    torch.testing.assert_close(load(tmp_path / "seen").records[0].weights(), seen.records[0].weights())


def make_map(name: str) -> linear.FeatureMap:
    return FEATURE_MAPS[name](width=C, count=9) if name == "performer" else FEATURE_MAPS[name]()


@pytest.mark.parametrize("name", list(FEATURE_MAPS))
def test_a_feature_map_weighs_by_products_of_features(name: str) -> None:
    q, k, v = draw(J, J, g=6, dtype=torch.float64)
    phi = make_map(name)
    weights = torch.einsum("bhir,bhjr->bhij", phi(q), phi(k)).tril()
    mass = weights.sum(-1, keepdim=True)
    expected = torch.where(mass > 0, weights / mass.clamp(min=1e-300), 0) @ v
    for form in linear.FORMS:
        out: Tensor = linear_attend(q, k, v, features=phi, mask=causal(), form=form).out
        torch.testing.assert_close(out, expected, atol=1e-9, rtol=1e-9, msg=f"{form} with {name}")


@pytest.mark.parametrize("name", list(ROPE_SCALINGS))
def test_a_scaling_lowers_frequencies_and_keeps_relative_positions(name: str) -> None:
    needs_original = "original" in inspect.signature(ROPE_SCALINGS[name]).parameters
    scaling = ROPE_SCALINGS[name](**{"factor": 4.0, **({"original": 64} if needs_original else {})})
    if isinstance(scaling, DynamicNTK):
        scaling = scaling.at_length(256)  # up to the original length nothing changes
    rope, plain = rotary(scaling=scaling), rotary()
    assert (rope.frequencies(8) <= plain.frequencies(8) * (1 + 1e-6)).all()
    assert not torch.equal(rope.frequencies(8), plain.frequencies(8))
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    near, far = ((rope(q, start + 3) * rope(k, start)).sum() for start in (0, 50))
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


def test_alibi_slopes_are_those_of_the_published_rule() -> None:
    """Recursive, as the authors write it: the slopes of the power of two below, and every other one of the next."""

    def published(heads: int) -> list[float]:
        if heads & (heads - 1) == 0:
            return [2 ** (-8 * n / heads) for n in range(1, heads + 1)]
        power = 1 << (heads.bit_length() - 1)
        return published(power) + published(2 * power)[::2][: heads - power]

    for heads in range(1, 40):
        torch.testing.assert_close(scores.alibi_slopes(heads), torch.tensor(published(heads)))
