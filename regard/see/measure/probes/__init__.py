"""How whatever attends is asked: functions in any layout, and layers with projections inside."""
