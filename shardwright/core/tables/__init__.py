"""The time and memory of units and ranks, counted once for the search and the plan."""
