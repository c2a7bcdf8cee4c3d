"""Import and export weights as Hugging Face folders, and look at trained models."""

from wlb.weights.hub_export import export as export
from wlb.weights.hub_import import MODEL_FILE as MODEL_FILE
from wlb.weights.hub_import import import_folder as import_folder
from wlb.weights.look import LoadedModel as LoadedModel
from wlb.weights.look import load as load
