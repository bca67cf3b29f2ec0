"""The C++ headers that walk a compiled grammar: the compiler of grammars and the loops compile them."""

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent

# As in grammar_walk.h; objects that are compiled with it check them.
MAX_DEPTH: Final = 64
POSITION_WORDS: Final = 3 + 2 * MAX_DEPTH
MOST_KEPT: Final = 64  # masks of one grammar
