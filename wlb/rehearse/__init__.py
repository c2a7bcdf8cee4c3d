"""Rehearse a cluster's job without a GPU: any rank, on fake CUDA tensors. See README.md."""
