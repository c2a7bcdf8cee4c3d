"""Tables for the terminal, plots, and pages for the browser."""
