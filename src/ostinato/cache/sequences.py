"""What the cache and the decoder both say of sequences: how many ids there are, and arrays of whole numbers."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_SEQ: Final = 256  # sequence ids are 0 .. 255 (C-1)

Ints = NDArray[np.int64]
