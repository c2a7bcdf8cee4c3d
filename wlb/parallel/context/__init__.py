"""Context parallelism: one micro-batch's attention over several ranks, which exchange keys."""
