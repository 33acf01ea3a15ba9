"""What units and ranks cost and hold, counted once for the search and the plan."""
