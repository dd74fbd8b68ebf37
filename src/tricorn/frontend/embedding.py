"""What a pooled prompt is to others: a vector."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tricorn.frontend.errors import BadRequest


def vector(data: bytes, *, normalize: bool = True, dimensions: int | None = None) -> NDArray[np.float32]:
    """The embedding of a delta, [D], cut to its first `dimensions` and then brought to length 1. Raises BadRequest for
    more dimensions than it has.
    """
    whole = np.frombuffer(data, np.float32)
    if dimensions is not None and dimensions > len(whole):
        message = f"dimensions ({dimensions}) must not be above the width of this model, {len(whole)}"
        raise BadRequest(message, "dimensions")
    wide = whole[:dimensions].astype(np.float64)
    length = float(np.sqrt(np.square(wide).sum())) if normalize else 1.0
    return (wide / (length or 1.0)).astype(np.float32)
