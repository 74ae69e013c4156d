"""Markdown as HTML."""

import pytest

from regard.base.markdown import markdown_html


def test_headings_paragraphs_lists_tables_and_code() -> None:
    text = (
        "## Why\n\nA `code` and **bold** *use* < 3.\n\n1. one\n   more\n2. two\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```\na\n\n b\n```"
    )
    html = markdown_html(text).replace("\n", "")
    assert html.startswith("<h3>Why</h3><p>A <code>code</code> and <strong>bold</strong> <em>use</em> &lt; 3.</p>")
    assert "<ol><li>onemore</li><li>two</li></ol>" in html
    assert "<tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr>" in html
    assert markdown_html(text).endswith("<pre><code>a\n\n b\n</code></pre>\n")


def test_a_paragraph_between_dollars_is_a_formula() -> None:
    html = markdown_html("before\n\n$$\nx_i < y\n$$\n\nafter")
    assert html.startswith('<p>before</p>\n<div class="formulas"><math')
    assert "<msub><mi>x</mi>" in html
    assert html.endswith("</math></div><p>after</p>\n")


def test_html_in_the_text_is_shown_as_text() -> None:
    assert markdown_html("<script>alert(1)</script>") == "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>\n"


def test_formulas_beside_each_other_break_between_them() -> None:
    assert markdown_html(r"$$x_i = 1, \quad y_i$$").count("<math") == 2


@pytest.mark.parametrize(
    ("words", "html"),
    [
        ("s_j = k_j . q", "s<sub>j</sub> = k<sub>j</sub> . q"),
        (
            "W^g_t, W_q^i and z_L^0.",
            "W<sup>g</sup><sub>t</sub>, W<sub>q</sub><sup>i</sup> and z<sub>L</sub><sup>0</sup>.",
        ),
        ("beta a_1i |q_i|^2", "β a<sub>1i</sub> |q<sub>i</sub>|<sup>2</sup>"),
        ("e^-s, e^48.3 times, 2 n^2 d.", "e<sup>-s</sup>, e<sup>48.3</sup> times, 2 n<sup>2</sup> d."),
        ("10000^{2k/d}, p_{i,2k}", "10000<sup>2k/d</sup>, p<sub>i,2k</sub>"),
        ("(1 + t)^2 mu_1a", "(1 + t)<sup>2</sup> μ<sub>1a</sub>"),
        ("beta^2 **eps.** mutual, `beta`", "β<sup>2</sup> <strong>ε.</strong> mutual, <code>beta</code>"),
        ("sum_l s_l, Cov_a(v, k), Omega_v", "sum<sub>l</sub> s<sub>l</sub>, Cov<sub>a</sub>(v, k), Ω<sub>v</sub>"),
        ("in_channels, hw4_impl.ipynb, `d_k`", "in_channels, hw4_impl.ipynb, <code>d_k</code>"),
    ],
)
def test_indices_and_powers_of_a_sentence_become_html(words: str, html: str) -> None:
    assert markdown_html(words) == f"<p>{html}</p>\n"
