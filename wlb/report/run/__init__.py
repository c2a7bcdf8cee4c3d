"""Records, figures and the page of a training run."""
