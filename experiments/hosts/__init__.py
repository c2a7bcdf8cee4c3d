"""Shows the planner in other libraries' loops: an example each, and its effect on balance."""
