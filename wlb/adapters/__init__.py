"""The planner in other people's training loops: one thin file per library, imported by name."""
