"""The reference of the public API as pages of HTML, rendered from its docstrings by pdoc.

python -m tests.reference build/docs
"""

import re
import sys
from pathlib import Path

import pdoc

import ostinato

MODULES = ("ostinato", "ostinato.errors", "ostinato.serve.settings")


def write(folder: Path) -> None:
    """Write the pages; `index.html` is the first."""
    for name in ostinato.__all__:
        setattr(ostinato, name, getattr(ostinato, name))  # pdoc does not ask for names that load on first use
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"Ostinato {ostinato.__version__}")
    pdoc.pdoc(*MODULES, output_directory=folder)
    for page in folder.rglob("*.html"):  # what is meant for doctest is not for readers
        text = re.sub(r' *<span class="c1"># doctest: \+SKIP</span>', "", page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(folder)
    print(f"{folder / 'index.html'} is the reference")
