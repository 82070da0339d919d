"""The site of the documentation, `make docs`: the pages that are read here too, and the API from its docstrings.

The sources are those below the root of the project, so that links between README, docs/ and the code hold there too.
"""

import logging
from importlib import metadata

# It tells of each plugin that it finds.
logging.getLogger("alembic").setLevel(logging.WARNING)

project = "fairqueue"
release = version = metadata.version(project)
root_doc = "docs/index"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/shop/README.md"),
    *("docs/*.md", "docs/api/*.rst", "docs/benchmarks/README.md"),
]
exclude_patterns = [".*"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxcontrib.mermaid"]
myst_fence_as_directive = {"mermaid"}
html_theme = "furo"
html_title = f"fairqueue {release}"
# As those that read the files elsewhere count them.
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_default_options = {"show-inheritance": True}
# So that it is the same site where Spark isn't installed.
autodoc_mock_imports = ["adbc_driver_manager", "adbc_driver_postgresql", "pandas", "pyarrow", "pyspark"]
# Links to the code are there for those who have it.
suppress_warnings = ["myst.xref_missing"]
