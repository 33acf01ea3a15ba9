"""A rank's actions under a schedule, and the messages between stages."""
