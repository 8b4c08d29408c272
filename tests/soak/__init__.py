"""The soak: many jobs a second, for long, under faults. Nothing may grow, and nothing may be lost."""
