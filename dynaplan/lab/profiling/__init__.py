"""The decisions of profile-sla: loads to measure, then sizes, thresholds, a profile, plots and options."""
