"""Import and export weights as Hugging Face folders, for any layout."""

from wlb.weights.hub_export import DEFAULT_SHARD_BYTES, Exported, export
from wlb.weights.hub_import import MODEL_FILE, Imported, import_folder

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "MODEL_FILE",
    "Exported",
    "Imported",
    "export",
    "import_folder",
]
