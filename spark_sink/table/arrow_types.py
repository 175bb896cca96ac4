"""Names for Arrow's classes that are generic to a type checker and plain at run time."""

from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    AnyArray = pa.Array[Any]
    AnyChunkedArray = pa.ChunkedArray[Any]
    AnyField = pa.Field[Any]
else:
    AnyArray = pa.Array
    AnyChunkedArray = pa.ChunkedArray
    AnyField = pa.Field
