"""The reports this project began with, run again."""
