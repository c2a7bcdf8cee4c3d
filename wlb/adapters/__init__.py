"""Other people's training loops: a file a library, which is imported when its file is.

`wlb.adapters.hugging_face` (transformers' Trainer, TRL, accelerate), `wlb.adapters.torchtitan` with
`wlb.adapters.torch_cp` (torch's context parallel), `wlb.adapters.megatron` (Megatron-Core). Each is
thin: the planner decides, the library trains.
"""
