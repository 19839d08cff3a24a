"""The page of methods, with equations as MathML, made from the registry."""

from __future__ import annotations

import re
from html import escape

from latex2mathml.converter import convert

from normfree.methods import Law, Method, get, names
from normfree.methods.method import options_text
from normfree.methods.method_registry import description

EQUATION = r"x_{l+1} = p\bigl(c\,(a\,h(s) + \beta\,f(e(\alpha\,x_l)) + \delta)\bigr)"
GREEK = {"alpha": r"\alpha", "beta": r"\beta", "delta": r"\delta"}
SCALARS = r"c, a, \beta, \alpha, \delta"
TITLES = {
    "norm-free": "Methods without normalization",
    "initialization": "Initializations alone",
    "normalized": "Normalized networks, for comparison",
}
VALUES = {  # the laws of the scalars, as the registry writes them, in LaTeX
    "√½": r"\sqrt{\tfrac{1}{2}}",
    "0.2": "0.2",
    "0.9^l": "0.9^{l}",
    "√(1-β²)": r"\sqrt{1-\beta^2}",
    "1/√(l + L)": r"\frac{1}{\sqrt{l+L}}",
    "1/√E[Var]": r"\frac{1}{\sqrt{\mathrm{E}[\mathrm{Var}[x_l]]}}",
    "1/std on a batch": r"\frac{1}{\mathrm{std}}\ \text{on a batch}",
    "in g, 0.9^b": r"0.9^{b}\ \text{(in the weights' lengths)}",
    "in g, 1/√B_k": r"\frac{1}{\sqrt{B_k}}\ \text{(in the weights' lengths)}",
    "(2N)^¼ or by encoder and decoder": r"(2N)^{1/4}\ \text{or by encoder and decoder}",
    "√(1 + Σ Var[f]) on a batch": r"\sqrt{1+\sum\mathrm{Var}[f]}\ \text{on a batch}",
}
WEIGHTS = {  # the main initializations; others stay as text
    "plain; N(0, 2/fan_in)": r"W \sim \mathcal{N}\bigl(0, \tfrac{2}{n_\mathrm{in}}\bigr)",
    "plain; He fan-in": r"W \sim \mathcal{N}\bigl(0, \tfrac{2}{n_\mathrm{in}}\bigr)",
    "plain; N(0, 2/fan_out)": r"W \sim \mathcal{N}\bigl(0, \tfrac{2}{n_\mathrm{out}}\bigr)",
    "plain; N(0, 2/(fan_in + fan_out))": r"W \sim \mathcal{N}\bigl(0, \tfrac{2}{n_\mathrm{in}+n_\mathrm{out}}\bigr)",
    "plain; per output channel γ²/fan_in, γ² = 2/(1-1/π)": (
        r"\mathrm{Var}[W] = \frac{\gamma^2}{n_\mathrm{in}}\ \text{per output channel},\quad"
        r" \gamma^2 = \frac{2}{1-1/\pi}"
    ),
    "plain; He fan-out (Transformers: Xavier) × L^(-1/(2m-2)), last and classifier 0, scalar biases": (
        r"\mathrm{Var}[W] = \frac{2}{n_\mathrm{out}}\,L^{-1/(m-1)}"
    ),
    "weight norm; orthogonal, g = √(γ·fan_in/fan_out)": (
        r"W = g\,\frac{v}{\lVert v \rVert},\quad g = \sqrt{\gamma\,\frac{n_\mathrm{in}}{n_\mathrm{out}}},\quad"
        r" v\ \text{orthogonal}"
    ),
    "plain; N(0, 1/fan_in), SELU, alpha dropout": r"W \sim \mathcal{N}\bigl(0, \tfrac{1}{n_\mathrm{in}}\bigr)",
}


def formula(latex: str, *, block: bool = False) -> str:
    """Return a formula as MathML, on one line."""
    mathml = convert(latex, display="block" if block else "inline")
    return f'<div class="formula">{mathml}</div>' if block else mathml


def law_latex(law: Law) -> str:
    """Return the law of a scalar in LaTeX, from its text in the registry."""
    text = law.text.removeprefix("learnable, ")
    value = VALUES.get(text) or (text if re.fullmatch(r"[\d.]+", text) else rf"\text{{{text}}}")
    return value + (r"\ \text{at first, learnable}" if law.learnable else "")


def present_laws(method: Method) -> dict[str, Law]:
    """Return the laws of the scalars that are not neutral."""
    return {name: law for name, law in method.rule.laws().items() if law.text not in ("1", "none")}


def residual_latex(method: Method) -> str:
    """Return the residual equation of a method, without the scalars that are neutral."""
    present = present_laws(method)
    shortcut = "x_l" if method.shortcut_text == "identity" or "a" in present else "h(s)"
    shortcut = rf"a\,{shortcut}" if "a" in present else shortcut
    branch = r"f(\alpha\,x_l)" if "alpha" in present else "f(x_l)"
    branch = rf"\beta\,{branch}" if "beta" in present else branch
    total = f"{shortcut} + {branch}" + (r" + \delta" if "delta" in present else "")
    total = rf"c\,({total})" if "c" in present else total
    return rf"x_{{l+1}} = p\bigl({total}\bigr)"


def method_section(name: str) -> str:
    """Return the section of one method."""
    method = get(name)
    named = method.summary.split()[0] in names()  # begins with the name of a method, which stays small
    lines = [f"### {name}", "", (method.summary if named else method.summary[0].upper() + method.summary[1:]) + ".", ""]
    lines += [formula(residual_latex(method), block=True), ""]
    laws = [rf"{GREEK.get(name, name)} = {law_latex(law)}" for name, law in present_laws(method).items()]
    if laws:
        lines += ["with " + ", ".join(formula(law) for law in laws), ""]
    if method.weights_text in WEIGHTS:
        lines += [formula(WEIGHTS[method.weights_text], block=True), ""]
    facts = {
        "Shortcut": method.shortcut_text,
        "Weights": method.weights_text,
        "Networks": ", ".join(method.skips),
        "Options": ", ".join(f"`{option}`" for option in options_text(method.options, "\n").splitlines()),
        "Reference": method.reference,
    }
    lines += [f"- *{fact}:* {markdown_text(text)}" for fact, text in facts.items() if text]
    more = [part for part in description(name).split("\n\n")[1:] if not part.startswith("Reference:")]
    if more:
        lines += [
            "",
            "<details markdown><summary>More</summary>",
            "",
            markdown_text("\n\n".join(more)),
            "",
            "</details>",
        ]
    return "\n".join(lines) + "\n"


def markdown_text(text: str) -> str:
    """Return a text in which no sign is Markdown by accident; code in backquotes stays."""
    parts = re.split(r"(`[^`]*`)", text)
    safe = [re.sub(r"([*_\[\]])", r"\\\1", escape(part, quote=False)) for part in parts[::2]]
    return "".join(a + b for a, b in zip(safe, [*parts[1::2], ""], strict=True))


def methods_page(when: str) -> str:
    """Return the page; `when` is the table that says what to use when."""
    lines = [
        "# Methods",
        "",
        "Every method is a setting of one equation:",
        "",
        formula(EQUATION, block=True),
        "",
        "| symbol | meaning |",
        "| --- | --- |",
        f"| {formula('x_l')} | the input of block {formula('l')} of {formula('L')} |",
        f"| {formula('f')} | the branch |",
        f"| {formula('e')} | the entry of the branch: the pre-activation, or Fixup's first bias |",
        f"| {formula('h')} | the shortcut: identity, 1×1 convolution, or subsampling |",
        f"| {formula('s')} | what the shortcut reads: the block's input, or the output of the entry |",
        f"| {formula('p')} | the operation after the sum: an activation, or nothing |",
        f"| {formula(SCALARS)} | scalars, fixed or learnable; those that are not shown below are neutral |",
        f"| {formula('m')} | the number of layers of a branch; {formula('B_k')}: branches of stage {formula('k')} |",
        "",
        when,
        "",
        "`normfree methods` prints the table, and `normfree methods NAME` the text of one. Options follow the name:"
        " `hanin:r=0.8`.",
        "",
    ]
    for kind, title in TITLES.items():
        lines += [f"## {title}", ""]
        lines += [method_section(name) for name in names() if get(name).kind == kind]
    return "\n".join(lines)
