"""Tables, plots and self-contained HTML pages; torch-free."""

from wlb.report.page import packing_page
from wlb.report.plots import require_matplotlib
from wlb.report.simulation_page import simulation_page
from wlb.report.simulation_tables import simulation_table, worth_of
from wlb.report.source import SourceFacts, facts_of
from wlb.report.tables import packing_table, remarks, tuning_table

__all__ = [
    "SourceFacts",
    "facts_of",
    "packing_page",
    "packing_table",
    "remarks",
    "require_matplotlib",
    "simulation_page",
    "simulation_table",
    "tuning_table",
    "worth_of",
]
