"""What a step took, what was predicted, and where that is written and shown."""
