"""The site that `make docs` builds from README.md, docs/ and the docstrings of the public names."""

import re

import pipeloom

project = "pipeloom"
release = pipeloom.__version__
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/images/*"]
exclude_patterns = [".venv", ".git", "build", "runs", "src", "tests", "bench", "examples"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
default_role = "code"
myst_heading_anchors = 4
html_title = "pipeloom"
html_theme = "furo"
html_extra_path = ["site"]  # its index.html leads to README.html
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"

FIELD = re.compile(r"^(?!Raises|Returns|Source)(\w[\w, ]*): ")


def _split_fields(app, what, name, obj, options, lines):  # type: ignore[no-untyped-def]
    """List what docstrings say of arguments: `name: text`, or several on a line, two spaces apart."""
    text = "\n".join(lines)
    head, doctest, rest = text.partition(">>>")
    head = re.sub(r"\.  (?=\w+(, \w+)*: )", ".\n", head)
    out: list[str] = []
    for line in head.split("\n"):
        if match := FIELD.match(line):
            if out and not out[-1].startswith(("* ", "  ")) and out[-1].strip():
                out.append("")
            out.append(f"* `{match[1]}`: {line[match.end() :].strip()}")
        elif re.match(r"(Raises|Returns|Source): ", line):
            out += ["", line]
        elif out and out[-1].startswith(("* ", "  ")) and line.strip():
            out.append("  " + line.strip())
        else:
            out.append(line.strip() if line.startswith("    ") else line)
    lines[:] = ("\n".join(out) + doctest + rest).split("\n")


def setup(app):  # type: ignore[no-untyped-def]
    app.connect("autodoc-process-docstring", _split_fields)
