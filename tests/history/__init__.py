"""The history checker: jobs under a seeded rain of faults, and every promise checked on what was recorded."""
