"""Formulas of docstrings and pages, written in plain text with the field's symbols, shown as MathML.

``A_i = (s_i − μ) / (σ + ε)`` needs no dollar signs to be read in an editor or on GitHub, so none are written. A formula
is a run of symbols, numbers, operators and calls with at least one sign that prose does not have.
"""

import re
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<number>(?<![\w.])\d+(?:[.,]\d+)*(?:e-?\d+)?(?![A-Za-z_\d]))"
    r"|(?P<name>[A-Za-z][A-Za-z0-9]+(?:_[A-Za-z0-9]+)*)"
    r"|(?P<symbol>[A-Za-zα-ωΑ-Ωℓϕ½∇∞][̄̂]?\*?)"
    r"|(?P<script>[_^](?:\{[^{}]*\}|\([^()]*\)|[A-Za-zα-ω0-9+−*∞]+)|[²³ᵀ′]|(?<=[a-zA-Zα-ω])'(?![\w]))"
    r"|(?P<operator><=|>=|!=|[=<>≤≥≠≈←→±·×/+−∈∋∪‖⌊⌋Σ∏∂√])"
    r"|(?P<open>[(\[])|(?P<close>[)\]])|(?P<bar>\|)|(?P<other>.)",
    re.S,
)
CALLS = frozenset(
    re.findall(r"\w+", "exp log sqrt cos softmax sg clip min max mean std inf abs Var Cov KL Beta loss k1 k2 k3")
)
PROSE_SIGNS = {"/", "→", "<", ">"}
"""Signs that stand between words too: alone they make no formula."""


class Token(NamedTuple):
    kind: str
    text: str


def tokens(text: str) -> list[Token]:
    found = []
    for match in TOKEN.finditer(text):
        kind, word = str(match.lastgroup), match.group()
        # One letter with its subscripts is a symbol whatever follows: s_ik, V_t; r_it; but log_probs is a name.
        if kind == "name" and (split := re.fullmatch(r"([A-Za-z])_(\w+)", word)):
            found += [Token("symbol", split[1]), Token("script", f"_{split[2]}")]
        elif kind == "name" and (split := re.fullmatch(r"(\w*[a-zA-Z]{2,})_([a-z0-9])", word)):
            found += [Token("name", split[1]), Token("script", f"_{split[2]}")]
        else:
            found.append(Token(kind, word))
    return found


def split(text: str, names: frozenset[str] = frozenset()) -> Iterator[tuple[bool, str]]:
    """The text in order, as (is it a formula, part); ``names`` are words that a formula may have: parameters."""
    stream, at, prose = tokens(text), 0, ""
    while at < len(stream):
        end = _formula(stream, at, names)
        if end > at:
            if prose:
                yield False, prose
            yield True, "".join(token.text for token in stream[at:end])
            at, prose = end, ""
        else:
            prose += stream[at].text
            at += 1
    if prose:
        yield False, prose


def _formula(stream: list[Token], start: int, names: frozenset[str]) -> int:
    """Where the formula that begins at ``start`` ends; ``start`` itself if none does."""
    if stream[start].kind in ("space", "script", "close", "other"):
        return start
    if start and stream[start - 1].kind not in ("space", "open") and stream[start - 1].text not in '"“—':
        return start  # inside a word, a path or a reference
    at = start
    while at < len(stream):
        after = _take(stream, at, names)
        if after == at:
            break
        at = after
    end = at
    while end > start and (stream[end - 1].kind == "space" or _loose_end(stream, start, end)):
        end -= 1
    inside = stream[start:end]
    if not inside or (end < len(stream) and stream[end].kind not in ("space", "other", "close")):
        return start
    if end < len(stream) and (stream[end].text in "-@`’" or [t.text for t in stream[end : end + 2]] == [",", ")"]):
        return start  # the rest of a word, or of a shape
    first, rest = inside[0], next((t for t in inside[1:] if t.kind != "space"), None)
    joined = rest is not None and (rest.kind in ("operator", "script", "open") or rest.text in CALLS)
    joined = joined or (first.kind == "number" and rest is not None and rest.kind == "symbol")
    if (first.kind in ("name", "number") or first.text in ("a", "A", "I")) and not joined and first.text not in CALLS:
        return start  # a word before the formula
    if first.kind == "operator" and first.text not in "−±ΣΔ⌊√∏∂":
        return start
    return end if _is_formula(inside) else start


def _take(stream: list[Token], at: int, names: frozenset[str]) -> int:
    """One thing of a formula from here: the place after it, or here."""
    kind, text = stream[at]
    following = stream[at + 1] if at + 1 < len(stream) else Token("other", "")
    if kind in ("space", "number", "symbol", "script", "operator"):
        if kind == "symbol" and (following.text == "(" or text + following.text == "E["):
            return _close(stream, at + 1, 60) or at + 1
        return at + 1
    if kind == "name":
        if text in CALLS or text in names or "_" in text or following.kind == "script":
            if following.kind == "open":
                return _close(stream, at + 1, 90) or at + 1
            return at + 1
        return at
    if kind == "open":
        end = _close(stream, at, 90)
        if end and stream[end - 2].text == ",":
            return at  # a shape, (B + 1,)
        within = stream[at + 1 : end - 1] if end else []
        plain = all(t.kind not in ("name", "other") or t.text in CALLS | names | {","} or "_" in t.text for t in within)
        return end if end and plain else at
    if kind == "bar":
        end = next((i for i in range(at + 1, min(at + 12, len(stream))) if stream[i].kind == "bar"), None)
        return end + 1 if end else at
    return at


def _close(stream: list[Token], opened: int, limit: int) -> int | None:
    depth = 0
    for i in range(opened, min(opened + limit, len(stream))):
        depth += (stream[i].kind == "open") - (stream[i].kind == "close")
        if depth == 0:
            return i + 1
    return None


def _loose_end(stream: list[Token], start: int, end: int) -> bool:
    """What cannot end a formula: an operator, or a word or number that no operator joins to it."""
    last = stream[end - 1]
    if last.kind == "operator":
        return last.text not in "⌋‖"
    if (last.kind == "name" and "_" not in last.text) or last.kind == "number" or last.text == "a":
        before = next((t for t in reversed(stream[start : end - 1]) if t.kind != "space"), None)
        return before is not None and before.kind not in ("operator", "open", "bar") and before.text not in CALLS
    return False


def _is_formula(inside: list[Token]) -> bool:
    signs = [t.text for t in inside if t.kind == "operator"]
    letters = [t for t in inside if t.kind in ("symbol", "script", "bar") or (t.kind == "name" and t.text in CALLS)]
    greek = any(re.match("[α-ωΑ-Ωℓ½∇∞]", t.text) for t in inside if t.kind == "symbol")
    scripted = any(t.kind == "script" for t in inside) and any(t.kind == "symbol" for t in inside)
    told = any(sign not in PROSE_SIGNS for sign in signs) and any(t.kind != "space" for t in inside)
    number_alone = not letters and not any(t.kind == "name" for t in inside)
    comparison = any(s in "<>" for s in signs) and any(t.kind == "symbol" or "_" in t.text for t in inside)
    called = bool(signs) and any(t.text in CALLS for t in inside) and any(t.kind == "open" for t in inside)
    return greek or scripted or comparison or called or (told and not number_alone)


def mathml(formula: str, *, block: bool = False) -> str:
    """The formula as a ``<math>`` element.

    >>> mathml("x_t²")
    '<math class="formula"><msubsup><mi>x</mi><mi>t</mi><mn>2</mn></msubsup></math>'
    """
    display = ' display="block"' if block else ""
    return f'<math class="formula"{display}>{_row(tokens(formula))}</math>'


def _row(stream: list[Token]) -> str:
    made: list[str] = []
    at, before = 0, Token("open", "")
    while at < len(stream):
        kind, text = stream[at]
        at += 1
        if kind == "space":
            after = stream[at].kind if at < len(stream) else "close"
            product = before.kind == "close" and after in ("symbol", "number", "open")
            if "operator" not in (before.kind, after) and ("name" in (before.kind, after) or product):
                made.append('<mspace width="0.25em"></mspace>')
            continue
        if text == "sqrt" and (end := _close(stream, at, 90)):
            base = f"<msqrt>{_row(stream[at + 1 : end - 1])}</msqrt>"
            at = end
        elif text in "−+±" and before.kind in ("operator", "open"):
            base = f'<mo form="prefix">{text}</mo>'
        else:
            base = _atom(kind, text)
        before = stream[at - 1]
        scripts: dict[str, str] = {}
        while at < len(stream) and stream[at].kind == "script":
            mark = stream[at].text
            scripts["sub" if mark[0] == "_" else "sup"] = _script(mark)
            at += 1
        names = [name for name in ("sub", "sup") if name in scripts]
        tag = f"m{''.join(names)}"
        made.append(f"<{tag}>{base}{''.join(scripts[name] for name in names)}</{tag}>" if names else base)
    return "".join(made)


def _atom(kind: str, text: str) -> str:
    shown = escape({"<=": "≤", ">=": "≥", "!=": "≠", "Σ": "∑"}.get(text, text), quote=False)
    if kind == "symbol" and text.endswith("*"):
        return f"<msup><mi>{shown[:-1]}</mi><mo>*</mo></msup>"
    if kind == "symbol" and text[-1] in "̄̂":
        return f'<mover accent="true"><mi>{shown[0]}</mi><mo>{"¯" if text[-1] == "̄" else "^"}</mo></mover>'
    if kind == "symbol":
        return f"<mi>{shown}</mi>"
    if kind == "number":
        return f"<mn>{shown}</mn>"
    if kind == "name" and text not in CALLS and "_" in text:
        return f'<mtext class="parameter">{shown}</mtext>'
    if kind == "name":
        return f"<mtext>{shown}</mtext>"
    if kind == "bar" or text == "/":
        return f'<mo stretchy="false" lspace="0.1em" rspace="0.1em">{shown}</mo>'
    if kind in ("open", "close"):
        return f'<mo stretchy="false">{shown}</mo>'
    return f"<mo>{shown}</mo>"


def _script(mark: str) -> str:
    if mark[0] in "²³":
        return f"<mn>{'23'['²³'.index(mark[0])]}</mn>"
    if mark[0] in "ᵀ′'":
        return f"<mo>{'⊤' if mark[0] == 'ᵀ' else '′'}</mo>"
    inner = mark[1:]
    if inner[0] in "{(":
        return f"<mrow>{_row(tokens(inner[1:-1]))}</mrow>"
    if re.fullmatch(r"[A-Za-z]{3,}|pg", inner):
        return f"<mtext>{inner}</mtext>"
    tags = ["mn" if c.isdigit() else "mo" if c in "+−*∞" else "mi" for c in inner]
    parts = [f"<{tag}>{c}</{tag}>" for tag, c in zip(tags, inner, strict=True)]
    return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"
