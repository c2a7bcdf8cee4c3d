"""The training loop and what surrounds it, from starting ranks to the final summary."""
