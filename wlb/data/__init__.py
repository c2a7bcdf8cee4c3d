"""What training reads: token stores, blends, document lengths, global batches."""

from wlb.data.batches import (
    GlobalBatches,
    ListedBatches,
    Source,
    SourceBatches,
    State,
    TargetSource,
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
from wlb.data.shuffle import permute
from wlb.data.store import StoreInfo, TokenArray, TokenStore, TokenStoreWriter
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
    "State",
    "StoreInfo",
    "StoreName",
    "StoreReader",
    "TargetSource",
    "TokenArray",
    "TokenStore",
    "TokenStoreWriter",
    "lengths_of_family",
    "lengths_of_file",
    "open_batches",
    "open_store",
    "permute",
    "verify_store",
]
