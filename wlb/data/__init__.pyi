"""Data that training reads: token stores, blends, document lengths, global batches."""

from wlb.data.batches import MOST_COUNT as MOST_COUNT
from wlb.data.batches import AccountedStream as AccountedStream
from wlb.data.batches import GlobalBatches as GlobalBatches
from wlb.data.batches import IdentifiedSource as IdentifiedSource
from wlb.data.batches import LengthSource as LengthSource
from wlb.data.batches import ListedBatches as ListedBatches
from wlb.data.batches import Source as Source
from wlb.data.batches import SourceBatches as SourceBatches
from wlb.data.blend import BlendedBatches as BlendedBatches
from wlb.data.blend import BlendedStore as BlendedStore
from wlb.data.blend import StoreName as StoreName
from wlb.data.blend import check_tokenizers as check_tokenizers
from wlb.data.blend import open_batches as open_batches
from wlb.data.blend import open_store as open_store
from wlb.data.length_files import lengths_of_file as lengths_of_file
from wlb.data.lengths import DRAWN as DRAWN
from wlb.data.lengths import FAMILIES as FAMILIES
from wlb.data.lengths import LengthFamily as LengthFamily
from wlb.data.lengths import enough_of_family as enough_of_family
from wlb.data.lengths import lengths_of_family as lengths_of_family
from wlb.data.reader import StoreReader as StoreReader
from wlb.data.store import TokenStore as TokenStore
from wlb.data.store import TokenStoreWriter as TokenStoreWriter
from wlb.data.verify import check_store as check_store
from wlb.data.verify import stamps_of as stamps_of
from wlb.data.verify import verify_store as verify_store
