"""Several copies of the gradient of a small table, so that fewer programs add to one address at the same time.

Programs that run at the same time have the same head, and their atomic adds go to the entries of that head: of 134 million
adds to 512 entries of 32 heads, 2 kB were in use at any time, and they took 8 ms. A program adds to the copy that its number
gives, and the copies are summed afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

#: There are at most this many copies, and they have at most this many bytes in all.
MOST_COPIES = 32
MOST_BYTES = 2**22


def copies(shape: Sequence[Any]) -> int:
    """Return the number of copies of a gradient of ``shape`` in fp32, a power of two. Without known sizes it is one."""
    sizes = [n for n in shape if isinstance(n, int)]
    if len(sizes) < len(shape):
        return 1
    fitting = MOST_BYTES // max(4 * math.prod(sizes), 1)
    return min(MOST_COPIES, 1 << max(fitting.bit_length() - 1, 0))
