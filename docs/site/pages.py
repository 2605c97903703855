"""What Sphinx needs to show this repository's files as they are: links, notebooks, docstrings, formulas."""

import importlib
import inspect
import json
import os
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_origin

from docutils import nodes
from formulas import mathml, split
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

import rlprims
import rlprims.types

DOCS = Path(__file__).parents[1]
SHOWN = re.compile(r"<!-- shown: (?P<path>\S+) -->\n.*\n?")
MADE = re.compile(r"\A.*<!-- made: (?P<module>\S+)\.(?P<function>\w+) -->\n", re.DOTALL)
END_OF_EXAMPLE = re.compile(r"^(```python\n(?:(?!```).*\n)*?)\n+(?=```$)", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")


def shown() -> dict[Path, str]:
    """Files outside docs that are pages, by the page that shows them."""
    pages = {}
    for path in DOCS.rglob("*.md"):
        if path.is_relative_to(DOCS / "_build"):
            continue
        if match := SHOWN.search(path.read_text(encoding="utf-8")):
            pages[(path.parent / match["path"]).resolve()] = path.relative_to(DOCS).as_posix()
    return pages


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    path = app.env.doc2path(docname)
    if path.suffix == ".rst":
        return
    text = notebook(json.loads(source[0])) if path.suffix == ".ipynb" else source[0]
    if match := MADE.search(text):
        text = getattr(importlib.import_module(match["module"]), match["function"])() + text[match.end() :]
    text = rebased(text, path.parent, path.parent)
    if match := SHOWN.search(text):
        file = (path.parent / match["path"]).resolve()
        app.env.note_dependency(str(file))
        inner = rebased(file.read_text(encoding="utf-8"), file.parent, path.parent)
        text = text.replace(match[0], inner)
    if docname.endswith("/README") and len([*path.parent.glob("*.md"), *path.parent.glob("*.ipynb")]) > 1:
        text += "\n\n```{toctree}\n:glob:\n:maxdepth: 1\n\n*\n```\n"
    source[0] = END_OF_EXAMPLE.sub(r"\1", text)  # doctest wants the blank line, readers do not


def rebased(text: str, home: Path, page: Path) -> str:
    """Links of a file that lies at ``home``, for a page at ``page``: to a page where there is one, else to the file."""

    def link(match: re.Match[str]) -> str:
        target = (home / match["path"]).resolve()
        if not target.exists():
            return match[0]
        if target.is_dir():
            target = target / "README.md"
        if target in PAGES:
            target = DOCS / PAGES[target]
        return Path(os.path.relpath(target, page)).as_posix() + (match["anchor"] or "")

    return LINK.sub(link, text)


PAGES = shown()


def notebook(content: dict[str, Any]) -> str:
    """An executed notebook as Markdown: what is stored is shown, and nothing runs."""
    parts = []
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
            if "text" in output:
                data["text/plain"] = "".join(output["text"])
            parts.append(f'```{{raw}} html\n<div class="output">{_output(data)}</div>\n```')
    return "\n\n".join(parts) + "\n"


def _output(data: dict[str, str]) -> str:
    if "image/png" in data:
        return f'<img class="figure" alt="figure" src="data:image/png;base64,{data["image/png"].strip()}">'
    return data.get("text/html") or f"<pre>{escape(data.get('text/plain', ''))}</pre>"


def docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Prose without the meanings that reStructuredText gives to bars and stars; blocks as they are."""
    literal = False
    for i, line in enumerate(lines):
        if i and lines[i - 1].rstrip().endswith("::"):
            literal = True
        elif line.strip() and not line.startswith("    "):
            literal = False
        if not literal and not line.lstrip().startswith((">>>", "...")):
            lines[i] = escaped(line)


def escaped(line: str) -> str:
    """Bars are absolute values, and a star alone is a parameter list's: neither is markup."""
    parts = re.split(r"(``.*?``|:\w[\w:]*:`[^`]*`)", line)
    parts[::2] = [re.sub(r"(?<!\\)\||(?<=[\s(,])\*(?=[,)])", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


class Package(SphinxDirective):
    """A package or module: its docstring, its public names at a glance, and each with its own docstring."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", name) == name
        ]
        found = {key: getattr(module, key) for key in public}
        documented = {key: value for key, value in found.items() if inspect.isroutine(value) or isinstance(value, type)}
        lines = [f".. automodule:: {name}", "", f".. currentmodule:: {name}", ""]
        if len(documented) > 1:
            lines += [".. list-table::", "   :widths: auto", "   :class: names", ""]
            for key, value in documented.items():
                lines += [f"   * - :py:obj:`{key}`", f"     - {first_line(value)}"]
            lines.append("")
        for key, value in found.items():
            if get_origin(value) is Annotated:
                lines += [f".. py:type:: {key}", "", f"   {escaped(value.__metadata__[0])}", ""]
        for key, value in documented.items():
            lines += [f".. autoclass:: {key}", "   :members:", ""] if isinstance(value, type) else []
            lines += [] if isinstance(value, type) else [f".. autofunction:: {key}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def first_line(thing: Any) -> str:
    return escaped((inspect.getdoc(thing) or "").partition("\n")[0])


def signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, given: str | None, gives: str | None) -> Any:
    """Tensors by the names that the source has for their shapes."""
    return tuple(text and SHAPE.sub(lambda match: SHAPES.get(match[1], match[0]), text) for text in (given, gives))


SHAPE = re.compile(r"~?(?:[\w.]+\.)?Annotated\[~?[\w.]*Tensor, ['\"]([^'\"]*)['\"]\]")
SHAPES = {
    value.__metadata__[0]: f"~rlprims.types.{key}"
    for key, value in vars(rlprims.types).items()
    if get_origin(value) is Annotated
}


class Names(SphinxTransform):
    """``advantage.grpo`` in a page leads to its reference."""

    default_priority = 890
    OFF = (nodes.title, nodes.reference, addnodes.pending_xref, addnodes.desc_signature)
    NAME = re.compile(r"(?:rlprims\.)?(\w+)\.(\w+)(?:\(.*\))?")

    def apply(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            match = self.NAME.fullmatch(literal.astext())
            if match is None or match[1] not in PACKAGES or _is_inside(literal, self.OFF):
                continue
            module = importlib.import_module(f"rlprims.{match[1]}")
            if callable(getattr(module, match[2], None)):
                target = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=f"rlprims.{match[1]}.{match[2]}", refwarn=False
                )
                literal.replace_self(target)
                target += literal


PACKAGES = {*rlprims._MODULES, "lab", "data_proto"}


class Stacked(SphinxTransform):
    """A table of settings or metrics says so in its classes: on a phone its cells stand below each other."""

    default_priority = 880
    CLASSES: ClassVar = {"setting": ["stacked", "settings"], "name": ["stacked"]}

    def apply(self, **kwargs: Any) -> None:
        for table in self.document.findall(nodes.table):
            first = next(iter(table.findall(nodes.entry)), None)
            table["classes"] += self.CLASSES.get(first.astext() if first else "", [])


class Formulas(SphinxTransform):
    """Formulas in prose become MathML."""

    default_priority = 900
    OFF = (nodes.literal, nodes.strong, nodes.literal_block, nodes.doctest_block, nodes.raw, nodes.title, nodes.math)
    OFF += (addnodes.desc_signature, nodes.comment, nodes.reference, addnodes.pending_xref)

    def apply(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            if _is_inside(text, self.OFF):
                continue
            names = frozenset(
                name.astext()
                for node in _ancestors(text)
                if isinstance(node, addnodes.desc)
                for name in node[0].findall(addnodes.desc_sig_name)
            )
            parts = list(split(text.astext(), names))
            if all(not formula for formula, _ in parts):
                continue
            alone = isinstance(text.parent.parent, nodes.block_quote) and len(text.parent) == 1
            made = [
                nodes.raw("", mathml(part, block=alone), format="html") if formula else nodes.Text(part)
                for formula, part in parts
            ]
            text.parent.replace(text, made)


def _ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _is_inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    return any(isinstance(above, kinds) for above in _ancestors(node))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", docstring, priority=900)
    app.connect("autodoc-process-signature", signature)
    app.add_directive("package", Package)
    app.add_transform(Names)
    app.add_transform(Formulas)
    app.add_transform(Stacked)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
