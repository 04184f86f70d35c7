"""What stands behind `hybridop <command>`: configurations, checks before a run, and the start of its processes."""
