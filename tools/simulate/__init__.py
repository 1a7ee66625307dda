"""Simulates a fleet by discrete events over the daemon's own router."""
