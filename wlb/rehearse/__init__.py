"""Rehearse any rank of a job on fake CUDA tensors, without a GPU. See README.md."""
