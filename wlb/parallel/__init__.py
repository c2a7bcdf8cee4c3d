"""Executors of plans: mesh, tensor, context, pipeline, expert and data parallelism."""
