"""Examines the machines of a run before a long job, in about two minutes."""

from wlb.doctor.finding import UNFIT as UNFIT
from wlb.doctor.finding import Finding as Finding
from wlb.doctor.finding import Verdict as Verdict
from wlb.doctor.finding import is_failed as is_failed
from wlb.doctor.start import Options as Options
from wlb.doctor.start import counts as counts
from wlb.doctor.start import examine as examine
