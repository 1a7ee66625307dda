"""Load with known answers under faults, hostile clients or a killed daemon."""
