"""Schedules of dispatch, explored from seeds or exhaustively."""
