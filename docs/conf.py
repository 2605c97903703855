"""The site: ``make docs``. Pages are the files of this folder as they are; site/ shows what Sphinx does not know."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "site"), str(HERE.parent)]

import rlprims  # noqa: E402

project = "rlprims"
author = "the rlprims authors"
version = release = rlprims.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "pages",
]
source_suffix = {".rst": "restructuredtext", ".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["_build", "site"]
smartquotes_action = "D"  # dashes alone: a prime is no quotation mark

myst_heading_anchors = 4
# A name that stands in two packages, such as DataProto, is ambiguous in a signature; it links to one of them.
suppress_warnings = ["ref.python"]
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"rlprims {release}"
html_static_path = ["site/static"]
html_css_files = ["style.css"]
html_copy_source = False
html_search_scorer = str(HERE / "site" / "scorer.js")
html_show_sphinx = False
# The button copies the code alone: no prompts, no output.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
templates_path = []
