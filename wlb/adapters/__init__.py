"""Adapters for training loops of other libraries; import a module, such as wlb.adapters.trl."""
