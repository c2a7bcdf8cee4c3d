"""wlb: workload-balanced 4-D parallelism for LLM training on packed documents."""

__version__ = "0.1.0"
