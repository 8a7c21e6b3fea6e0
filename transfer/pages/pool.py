"""Pages of one size in this process's memory."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from transfer.objects import Bytes


class Pool:
    """Pages 0 .. num_pages - 1, each in one or more planes: page i is its part of every plane, say one plane a layer.

    Attributes:
        planes: one contiguous buffer each, uint8 `[num_pages * page_nbytes]`, by name.
        page_nbytes: bytes of a page in one plane.
        num_pages: pages, the same in every plane.
    """

    def __init__(self, planes: Mapping[str, Bytes], page_nbytes: int) -> None:
        """Takes the buffers as they are, without a copy.

        Raises:
            ValueError: no plane, a buffer that is not writeable contiguous uint8 `[nbytes]`, buffers of different or
                partial pages, or that overlap.
        """
        if not planes or page_nbytes < 1:
            raise ValueError(
                f"a pool has at least one plane and byte a page, not {len(planes)} and {page_nbytes}"
            )
        for name, plane in planes.items():
            if plane.dtype != np.uint8 or plane.ndim != 1 or not plane.flags.c_contiguous:
                raise ValueError(
                    f"plane {name!r} is {plane.dtype}{list(plane.shape)}; give a contiguous uint8 [nbytes] view"
                )
            if not plane.flags.writeable:
                raise ValueError(f"plane {name!r} is read-only; give the pool memory of its own")
        sizes = {name: plane.nbytes for name, plane in planes.items()}
        nbytes = next(iter(sizes.values()))
        if set(sizes.values()) != {nbytes} or nbytes == 0 or nbytes % page_nbytes:
            raise ValueError(
                f"every plane has the same whole number of pages of {page_nbytes} bytes; these have bytes {sizes}"
            )
        spans = sorted((plane.ctypes.data, name) for name, plane in planes.items())
        for (first, left), (second, right) in pairwise(spans):
            if first + nbytes > second:
                raise ValueError(f"planes {left!r} and {right!r} overlap; give each its own memory")
        self.planes = dict(planes)
        self.page_nbytes = page_nbytes
        self.num_pages = nbytes // page_nbytes

    def page(self, plane: str, page: int) -> Bytes:
        """One page of one plane: a view, uint8 `[page_nbytes]`."""
        if not 0 <= page < self.num_pages:
            raise ValueError(f"{page=} is not in 0 .. {self.num_pages - 1}")
        return self.planes[plane][page * self.page_nbytes : (page + 1) * self.page_nbytes]
