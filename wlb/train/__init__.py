"""The training loop and its surroundings, from starting ranks to the final summary."""
