"""Definitions that the cache and the decoder share: the number of sequence ids, and integer arrays."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_SEQ: Final = 256  # sequence ids are 0 .. 255 (C-1)

Ints = NDArray[np.int64]
