"""The planner in other people's loops: an example for each, and what it does for balance."""
