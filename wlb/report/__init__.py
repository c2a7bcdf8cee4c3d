"""Tables, plots and self-contained HTML pages; torch-free."""

from wlb.report.packing.page import packing_page
from wlb.report.packing.source import SourceFacts, facts_of
from wlb.report.packing.tables import packing_table, remarks, tuning_table, weight_remark
from wlb.report.plots import require_matplotlib
from wlb.report.run.page import run_page
from wlb.report.run.records import RunRecords, read_run
from wlb.report.simulation.page import simulated, simulation_page
from wlb.report.simulation.tables import layout_text, simulation_table, worth_line, worth_of

__all__ = [
    "RunRecords",
    "SourceFacts",
    "facts_of",
    "layout_text",
    "packing_page",
    "packing_table",
    "read_run",
    "remarks",
    "require_matplotlib",
    "run_page",
    "simulated",
    "simulation_page",
    "simulation_table",
    "tuning_table",
    "weight_remark",
    "worth_line",
    "worth_of",
]
