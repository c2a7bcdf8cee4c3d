"""Executors of plans: mesh, tensor, context, pipeline and data parallelism."""
