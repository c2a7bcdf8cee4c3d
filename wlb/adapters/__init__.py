"""The planner in other libraries' training loops: one module per library, imported by its name."""
