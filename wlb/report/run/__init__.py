"""The records of a training run, its figures and its HTML page."""
