"""The site's settings: `make site` builds docs/ into build/site, with warnings as errors."""

project = "epdd"
copyright = "the epdd authors, Apache-2.0"      # noqa: A001 (Sphinx' name)
html_title = "epdd"

extensions = ["myst_parser"]
myst_heading_anchors = 3
# `---` in a table is not a dash, and "..." stays as typed.
smartquotes = False

# It loads nothing from other hosts: fonts are those of the reader.
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
