# ruff: noqa: RUF001 (mathematical signs that look like letters)
"""Formulas as trees: text, LaTeX and MathML of the same thing."""

import math
import re
from fractions import Fraction
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings, strategies as st

from regard.base import formulas
from regard.base.errors import ConfigError
from regard.base.formulas import (
    Chain,
    Difference,
    Entry,
    Expression,
    FunctionCall,
    MatrixLiteral,
    Number,
    Power,
    Product,
    Quotient,
    Root,
    Sum,
    Symbol,
    Transpose,
    Word,
    mathml,
    parse_latex,
    text,
)

HALF = Number(Fraction(-1, 2))
X = Symbol("X")


@pytest.mark.parametrize(
    ("tree", "shown", "latex"),
    [
        (Number(3), "3", "3"),
        (HALF, "-1/2", r"-\tfrac{1}{2}"),
        (Number(0.25), "0.250000", "0.250000"),
        (Number(-math.inf), "-∞", r"-\infty"),
        (Number(2.5e-10), "2.500000e-10", r"2.500000 \times 10^{-10}"),
        (Number(Fraction(1, 3_000_017)), "3.333314e-07", r"3.333314 \times 10^{-7}"),
        (Symbol("W", "Q", 2), "W_Q⁽²⁾", "W_{Q}^{(2)}"),
        (Symbol("Ω", "q"), "Ω_q", r"\Omega_{q}"),
        (Entry(Symbol("Q", above=12), (1, 3)), "Q⁽¹²⁾[1,3]", "Q_{1,3}^{(12)}"),
        (Sum((Number(1), HALF)), "1 - 1/2", r"1 - \tfrac{1}{2}"),
        (Sum((Product((Number(-1), HALF)), Number(2))), "(-1)·(-1/2) + 2", None),
        (Product((X, Transpose(Symbol("K"))), dot=False), "X Kᵀ", r"X\,{K}^{\top}"),
        (Product((Sum((X, X)), X)), "(X + X)·X", r"\left(X + X\right) \cdot X"),
        (Quotient(Number(Fraction(3, 2)), Root(Number(2))), "(3/2)/√2", r"\frac{\tfrac{3}{2}}{\sqrt{2}}"),
        (Quotient(Number(3), Product((Number(2), Root(Number(2))), dot=False)), "3/(2√2)", r"\frac{3}{2\,\sqrt{2}}"),
        (Difference(X, Quotient(Number(-5), X)), "X - (-5/X)", r"X - \left(\frac{-5}{X}\right)"),
        (Power(Symbol("e"), Difference(X, X)), "e^(X - X)", "e^{X - X}"),
        (FunctionCall("softmax", (X, Word("each row"))), "softmax(X, each row)", None),
        (Chain((X, Number(1), Number(2)), ("=", "≈")), "X = 1 ≈ 2", r"X = 1 \approx 2"),
        (Word("50% of a_b"), "50% of a_b", r"\text{50\% of a\_b}"),
    ],
)
def test_a_tree_is_written_in_text_and_latex(tree: Expression, shown: str, latex: str | None) -> None:
    assert formulas.text(tree) == shown
    if latex is not None:
        assert formulas.latex(tree) == latex
    ElementTree.fromstring(formulas.mathml(tree))


def test_a_matrix_stands_in_the_middle_of_its_line() -> None:
    tree = Chain((X, MatrixLiteral(((Number(1), HALF), (Number(10), Number(0)), (Number(7), Number(8))))), ("=",))
    assert formulas.text(tree) == "    ⎡  1  -1/2 ⎤\nX = ⎢ 10     0 ⎥\n    ⎣  7     8 ⎦"
    assert formulas.text(MatrixLiteral(((Number(1), Number(2)),))) == "[ 1  2 ]"
    assert formulas.latex(MatrixLiteral(((Number(1), HALF),))) == r"\begin{bmatrix} 1 & -\tfrac{1}{2} \end{bmatrix}"


def test_mathml_says_what_is_what() -> None:
    drawn = formulas.mathml(Sum((Root(HALF), Symbol("W", "Q", 2))), block=False)
    assert "<msqrt><mrow><mo>\u2212</mo><mfrac><mn>1</mn><mn>2</mn></mfrac></mrow></msqrt>" in drawn
    assert "<msubsup><mi>W</mi><mi>Q</mi><mtext>(2)</mtext></msubsup>" in drawn
    assert 'display="block"' not in drawn
    assert 'display="block"' in formulas.mathml(X)


def test_words_cannot_break_out_of_a_page() -> None:
    assert "<script>" not in formulas.mathml(Word("<script>"))
    assert formulas.escape_latex("a_b{$\\}") == r"a\_b\{\$\textbackslash{}\}"


def test_digits_are_chosen_where_a_tree_is_written() -> None:
    assert [formulas.text(Number(2 / 3), digits) for digits in (2, 8)] == ["0.67", "0.66666667"]
    assert formulas.text(Number(-1e-17 + 0.0), 3) == "-1.000e-17"
    assert formulas.decimal(-0.0) == "0.000000"


def test_small_numbers_have_as_many_digits_as_others_so_that_steps_follow_from_what_is_shown() -> None:
    top, bottom = math.exp(-10.5), 1.0015309657
    shown = [formulas.decimal(value) for value in (top, bottom, top / bottom)]
    assert shown == ["2.753645e-05", "1.001531", "2.749436e-05"]
    assert formulas.decimal(float(shown[0]) / float(shown[1])) == shown[2]
    assert [formulas.decimal(value) for value in (0.001, -0.0009, 0.06)] == ["0.001000", "-9.000000e-04", "0.060000"]
    assert formulas.decimal(0.06, 1) == "6.0e-02"


def test_a_whole_number_stays_whole_however_large() -> None:
    assert formulas.text(Number(Fraction(-(10**12)))) == "-1000000000000"


@pytest.mark.parametrize(
    ("value", "exact"),
    [(3, True), (-(10**7), True), (Fraction(1, 3), True), (0.5, False), (Fraction(1, 10**6 + 3), False)],
)
def test_what_is_rounded_is_known(value: int | Fraction | float, exact: bool) -> None:
    assert formulas.is_written_exactly(value) is exact


def test_a_tree_that_means_nothing_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="2 sides take 1 relations"):
        Chain((X, X), ())
    with pytest.raises(ValueError, match="at least one term"):
        Sum(())


LEAVES = st.one_of(
    st.fractions(max_denominator=9).map(Number),
    st.floats(-1e3, 1e3).map(Number),
    st.sampled_from([X, Symbol("W", "Q")]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(Sum),
        st.tuples(inner, inner).map(Product),
        st.builds(Quotient, inner, inner),
        st.builds(Power, inner, inner),
        st.builds(Root, inner),
    ),
    max_leaves=9,
)


@settings(max_examples=40, deadline=None)
@given(TREES.flatmap(lambda tree: st.sampled_from([tree, MatrixLiteral(((tree, X), (X, tree)))])))
def test_any_tree_is_well_formed_everywhere(tree: Expression) -> None:
    ElementTree.fromstring(formulas.mathml(tree))
    latex = formulas.latex(tree)
    assert latex.count("{") == latex.count("}")
    assert latex.count(r"\left(") == latex.count(r"\right)")
    lines = formulas.text(tree).splitlines()
    assert lines
    assert sum(line.count("(") - line.count(")") for line in lines) == 0


NUMBERS = st.fractions(min_value=-9, max_value=9, max_denominator=7).map(Number)
ARITHMETIC = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(Sum), st.tuples(inner, inner).map(Product), st.builds(Difference, inner, inner)
    ),
    max_leaves=8,
)


def worth(tree: Expression) -> Fraction:
    match tree:
        case Number(value):
            return Fraction(value)
        case Sum(terms):
            return sum(map(worth, terms), Fraction(0))
        case Product(factors):
            return math.prod(map(worth, factors), start=Fraction(1))
        case Difference(first, second):
            return worth(first) - worth(second)
    raise AssertionError(tree)


@settings(max_examples=40, deadline=None)
@given(ARITHMETIC)
def test_brackets_stand_where_they_change_the_worth(tree: Expression) -> None:
    spelled = formulas.text(tree).replace("·", "*")
    assert eval(spelled) == pytest.approx(float(worth(tree)), abs=1e-9)


CHILDREN = {"mfrac": 2, "msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2, "munderover": 3, "msqrt": 1}


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (r"a_j = \frac{\exp(\beta s_j)}{\sum_l \exp(\beta s_l)}", "aⱼ = exp(β sⱼ)/(Σₗ exp(β sₗ))"),
        (r"H = V \mathrm{softargmax}_\beta(K^\top Q)", "H = V softargmaxᵦ(Kᵀ Q)"),
        (r"\frac{\partial y_i}{\partial z_j} = y_i(\delta_{ij} - y_j)", "∂yᵢ/∂zⱼ = yᵢ(δᵢⱼ - yⱼ)"),
        (r"QK^\top/\sqrt{d_k}", "QKᵀ/√dₖ"),
        (r"\sqrt{a + b} \neq \sqrt c", "√(a + b) ≠ √c"),
        (r"\sqrt{d/h} + \sqrt{d}/h", "√(d/h) + √d/h"),
        (r"W_Q X_{QK}^{n \times d}", "W_Q X_(QK)^(n × d)"),
        (r"\sum_{j=1}^{n} a_{ij} v_j", "Σⱼ₌₁ⁿ aᵢⱼ vⱼ"),
        ("x = -1, -x + (-2.5)", "x = -1, -x + (-2.5)"),
        (r"\frac{1}{2} x \to \frac{x}{2}", "(1/2) x → x/2"),
        (r"\frac{a b}{c d}", "(a b)/(c d)"),
        (r"(\frac{a}{b})^2", "(a/b)²"),
        (r"\| x \| \text{ if small}", "‖ x ‖ if small"),
        (r"(\Delta h)\Delta x", "(Δh)Δx"),
        (r"a = b, \quad c = d", "a = b,   c = d"),
        (r"\mathrm{for large} \beta: f \to [0, 1]", "for large β: f → [0, 1]"),
    ],
)
def test_latex_is_parsed_and_written_as_text_and_mathml(source: str, shown: str) -> None:
    tree = parse_latex(source)
    assert text(tree) == shown
    for part in ElementTree.fromstring(mathml(tree)).iter():
        assert len(part) == CHILDREN.get(part.tag, len(part)), ElementTree.tostring(part)
    assert text(parse_latex(formulas.latex(tree))) == shown, "what is written as LaTeX can be parsed again"


def test_a_parsed_formula_as_mathml() -> None:
    shown = mathml(parse_latex(r"a_j^2 = -\frac{\exp(x)}{\sum_{l}^n \sqrt{b}}"))
    assert "<msubsup><mi>a</mi><mi>j</mi><mn>2</mn></msubsup>" in shown
    assert "<mo>\u2212</mo><mfrac>" in shown
    assert "<mtext>exp</mtext><mrow><mo>(</mo><mi>x</mi><mo>)</mo></mrow>" in shown
    assert "<munderover><mo>∑</mo><mi>l</mi><mi>n</mi></munderover>" in shown
    assert "<msqrt><mi>b</mi></msqrt>" in shown
    assert "<mtext>&lt;b&gt;</mtext>" in mathml(parse_latex(r"\text{<b>}"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (r"\bta x", r"unknown \bta; did you mean \beta? in the formula \bta x"),
        (r"\zzzzzz", r"unknown \zzzzzz in the formula"),
        ("x^23", "LaTeX takes only the first digit of 23; use braces"),
        ("{a", "} is missing at the end"),
        ("(a", ") is missing at the end"),
        ("a}", "unknown }"),
        ("a)", "unknown )"),
        ("a_b_c", "two _ follow each other; use braces"),
        (r"\frac{a}", "an argument is missing at the end"),
        (r"\mathrm a", r"\mathrm needs text in braces"),
        ("x ~ y", "unknown ~"),
    ],
)
def test_latex_that_cannot_be_parsed_is_an_error(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_latex(source)
