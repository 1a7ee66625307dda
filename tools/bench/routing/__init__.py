"""What policies do with a fleet, and what a decision costs."""
