"""What training reads: token stores, blends, document lengths, global batches."""

from wlb.data.batches import (
    GlobalBatches,
    ListedBatches,
    Source,
    SourceBatches,
)
from wlb.data.blend import BlendedBatches, BlendedStore, StoreName, open_batches, open_store
from wlb.data.lengths import (
    FAMILIES,
    LengthFamily,
    LengthSource,
    lengths_of_family,
    lengths_of_file,
)
from wlb.data.reader import StoreReader
from wlb.data.store import TokenArray, TokenStore, TokenStoreWriter
from wlb.data.verify import verify_store

__all__ = [
    "FAMILIES",
    "BlendedBatches",
    "BlendedStore",
    "GlobalBatches",
    "LengthFamily",
    "LengthSource",
    "ListedBatches",
    "Source",
    "SourceBatches",
    "StoreName",
    "StoreReader",
    "TokenArray",
    "TokenStore",
    "TokenStoreWriter",
    "lengths_of_family",
    "lengths_of_file",
    "open_batches",
    "open_store",
    "verify_store",
]
