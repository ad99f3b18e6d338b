"""The commands about the box itself: what it has and lacks, and a report for a bug."""
