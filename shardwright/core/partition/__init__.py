"""Ways to cut a sequence of units into stages."""
