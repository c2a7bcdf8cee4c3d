"""Tables, plots and self-contained HTML pages; torch-free."""

from wlb.report.packing.page import packing_page as packing_page
from wlb.report.packing.tables import SourceFacts as SourceFacts
from wlb.report.packing.tables import facts_of as facts_of
from wlb.report.packing.tables import packing_table as packing_table
from wlb.report.packing.tables import remarks as remarks
from wlb.report.packing.tables import saving_line as saving_line
from wlb.report.packing.tables import tuning_table as tuning_table
from wlb.report.packing.tables import uneven as uneven
from wlb.report.packing.tables import weight_remark as weight_remark
from wlb.report.plots import require_matplotlib as require_matplotlib
from wlb.report.run.compare import runs_tables as runs_tables
from wlb.report.run.page import run_page as run_page
from wlb.report.run.records import RunRecords as RunRecords
from wlb.report.run.records import read_run as read_run
from wlb.report.simulation import layout_text as layout_text
from wlb.report.simulation import simulation_table as simulation_table
from wlb.report.simulation import worth_line as worth_line
from wlb.report.simulation import worth_of as worth_of
