"""Many models on few devices: their units as one pool, and the policies that say whose is next."""
