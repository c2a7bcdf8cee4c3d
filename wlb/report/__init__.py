"""Results of wlb as tables for the terminal, as figures and as HTML pages."""
