"""Processes, devices, process groups, messages between ranks, the watchdog and the heartbeat."""
